"""The generated stubs are those of proto/peer.proto, and old enough for every version that pyproject.toml allows."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from peer.wire import peer_pb2, peer_pb2_grpc

ROOT = Path(__file__).parents[1]
WIRE = ROOT / "peer" / "wire"


def compiled(folder: Path) -> FileDescriptorProto:
    out = folder / "set"
    source = f"-Ipeer/wire={ROOT / 'proto'}"
    assert protoc.main(["protoc", source, f"--descriptor_set_out={out}", "peer/wire/peer.proto"]) == 0
    (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")  # protoc adds it to a set, and not to Python
    return file


def committed() -> FileDescriptorProto:
    return FileDescriptorProto.FromString(peer_pb2.DESCRIPTOR.serialized_pb)


def test_the_stubs_are_current(tmp_path: Path) -> None:
    assert committed() == compiled(tmp_path)


def test_the_types_name_every_message_field_and_enum_value() -> None:
    tree = ast.parse((WIRE / "peer_pb2.pyi").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert set(classes) == {message.name for message in committed().message_type}
    for message in committed().message_type:
        names = {
            node.target.id
            for node in ast.walk(classes[message.name])
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        expected = {field.name for field in message.field}
        expected |= {value.name for enum in message.enum_type for value in enum.value}
        assert expected <= names
        assert {name for name in names - expected if not name.endswith("_FIELD_NUMBER")} == set()


def test_the_service_has_the_methods_of_the_contract() -> None:
    (service,) = committed().service
    methods = [method.name for method in service.method]
    assert methods == ["Talk"]
    assert all(hasattr(getattr(peer_pb2_grpc, f"{service.name}Servicer"), name) for name in methods)
    assert f"/{committed().package}.{service.name}/Talk" in (WIRE / "peer_pb2_grpc.py").read_text()


def test_the_stubs_accept_the_oldest_runtimes_that_are_allowed() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = {
        name: match[1]
        for name in ("grpcio", "protobuf")
        if (match := re.search(rf"{name}>=([\d.]+)", str(requirements)))
    }
    made_for = {
        "grpcio": re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", (WIRE / "peer_pb2_grpc.py").read_text()),
        "protobuf": re.search(r"Protobuf Python Version: ([\d.]+)", (WIRE / "peer_pb2.py").read_text()),
    }
    for name, found in made_for.items():
        assert found is not None
        assert numbers(found[1]) <= numbers(oldest[name])


def numbers(version: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in version.split("."))
    return found + (0,) * (3 - len(found))
