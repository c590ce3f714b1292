from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Message(_message.Message):
    __slots__ = ("offer", "answer", "frame", "commit", "done", "abort", "inquiry", "outcome", "state_request", "state_header", "state_chunk", "cut", "progress")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    INQUIRY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    STATE_HEADER_FIELD_NUMBER: _ClassVar[int]
    STATE_CHUNK_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    answer: Answer
    frame: Frame
    commit: Commit
    done: Done
    abort: Abort
    inquiry: Inquiry
    outcome: Outcome
    state_request: StateRequest
    state_header: StateHeader
    state_chunk: StateChunk
    cut: Cut
    progress: Progress
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., inquiry: _Optional[_Union[Inquiry, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., state_request: _Optional[_Union[StateRequest, _Mapping]] = ..., state_header: _Optional[_Union[StateHeader, _Mapping]] = ..., state_chunk: _Optional[_Union[StateChunk, _Mapping]] = ..., cut: _Optional[_Union[Cut, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("protocol", "run_id", "origin", "peer_id", "round", "meeting_id", "codec", "weight", "patience_ms", "budget_bytes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MEETING_ID_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_MS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    origin: str
    peer_id: str
    round: int
    meeting_id: bytes
    codec: str
    weight: float
    patience_ms: int
    budget_bytes: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., origin: _Optional[str] = ..., peer_id: _Optional[str] = ..., round: _Optional[int] = ..., meeting_id: _Optional[bytes] = ..., codec: _Optional[str] = ..., weight: _Optional[float] = ..., patience_ms: _Optional[int] = ..., budget_bytes: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("accepted", "reason", "detail", "peer_id", "round", "patience_ms", "codec", "weight", "budget_bytes", "rest_ms")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_MS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    REST_MS_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    detail: str
    peer_id: str
    round: int
    patience_ms: int
    codec: str
    weight: float
    budget_bytes: int
    rest_ms: int
    def __init__(self, accepted: bool = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., peer_id: _Optional[str] = ..., round: _Optional[int] = ..., patience_ms: _Optional[int] = ..., codec: _Optional[str] = ..., weight: _Optional[float] = ..., budget_bytes: _Optional[int] = ..., rest_ms: _Optional[int] = ...) -> None: ...

class Cut(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("leg", "offset", "payload", "checksum")
    LEG_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    leg: int
    offset: int
    payload: bytes
    checksum: int
    def __init__(self, leg: _Optional[int] = ..., offset: _Optional[int] = ..., payload: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Abort(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    detail: str
    def __init__(self, reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Inquiry(_message.Message):
    __slots__ = ("meeting_id",)
    MEETING_ID_FIELD_NUMBER: _ClassVar[int]
    meeting_id: bytes
    def __init__(self, meeting_id: _Optional[bytes] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("ending",)
    class Ending(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Outcome.Ending]
        APPLIED: _ClassVar[Outcome.Ending]
        UNTOUCHED: _ClassVar[Outcome.Ending]
    UNKNOWN: Outcome.Ending
    APPLIED: Outcome.Ending
    UNTOUCHED: Outcome.Ending
    ENDING_FIELD_NUMBER: _ClassVar[int]
    ending: Outcome.Ending
    def __init__(self, ending: _Optional[_Union[Outcome.Ending, str]] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("protocol", "run_id", "peer_id", "snapshot_id", "first_chunk", "round")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    peer_id: str
    snapshot_id: str
    first_chunk: int
    round: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., peer_id: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., first_chunk: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class StateHeader(_message.Message):
    __slots__ = ("snapshot_id", "round", "origin", "tensors", "size_bytes", "chunk_bytes", "hashes")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    round: int
    origin: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    size_bytes: int
    chunk_bytes: int
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, snapshot_id: _Optional[str] = ..., round: _Optional[int] = ..., origin: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., size_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TensorEntry(_message.Message):
    __slots__ = ("name", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("index", "payload")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    index: int
    payload: bytes
    def __init__(self, index: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("protocol", "run_id", "peer_id", "addresses", "round", "shard", "expires_s")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    peer_id: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    round: int
    shard: int
    expires_s: float
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., peer_id: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., round: _Optional[int] = ..., shard: _Optional[int] = ..., expires_s: _Optional[float] = ...) -> None: ...

class SignedRecord(_message.Message):
    __slots__ = ("record", "public_key", "signature")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    public_key: bytes
    signature: bytes
    def __init__(self, record: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
