"""GASLoC as the daemon does it: each peer trains at its own pace, meetings go on beside, nobody waits.

What is simplified: an exchange reads the weights of both sides once, when the meeting begins, as each one's last step
left them (the daemon reads them as they are when a leg is due); its correction is added at each
side's first step boundary after the time that the links take for its bytes. A peer knows at once who is free, so no
offer is ever declined. Lines are shared evenly by nobody: two meetings at once each have all of one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from peer.core.admit import MEETING_ID_BYTES
from peer.core.allocation import Allocation
from peer.core.change import Correction
from peer.core.plan import Cost, Means, Plan, plan, within
from peer.core.prior import guesses, next_priors, seed_of, start_priors
from peer.core.terms import AUTO, Terms, agree, codecs
from peer.lab.encounter import Encounter, encounter
from peer.lab.graphs import pairs
from peer.lab.world import World

TURNS = 5
"""How often a meeting changes direction: the offer, its answer, and the three legs of the exchange."""

SEATS = 3
"""Meetings at once, at most."""

SHARE = 0.5
"""Of its line, what a peer uses for meetings where the codec follows the links."""

FASTEST_BITS_PER_S = 1e12

EARLY_S = 1e-9
"""Times nearer than this are one."""


@dataclass(frozen=True)
class _Due:
    """A correction on its way to one side of a meeting."""

    at_s: float
    correction: Correction
    weight: float
    other: int


class Beside:
    """Peers that train and meet on their own clocks, as long as one round of middling speed at a time."""

    def __init__(self, world: World) -> None:
        self._world = world
        run = world.experiment.run
        shapes = {name: tuple(weight.shape) for name, weight in world.population.states[0].weights.items()}
        self._allocations = {spec: Allocation(shapes, codec) for spec, codec in codecs(run.exchange.codec).items()}
        self._costs = {spec: Cost(made.least_bytes, made.whole_bytes) for spec, made in self._allocations.items()}
        peers = range(world.experiment.peers)
        self._plans = [self._plan(peer) for peer in peers] if run.exchange.codec == AUTO else None
        self._priors = [start_priors(shapes) for _ in peers]
        self._step_ends_s = [world.links.peers[peer].step_s for peer in peers]
        self._round_began_s = [0.0 for _ in peers]
        self._ready_s = [0.0 for _ in peers]
        # Meetings after the round are due once there was one.
        self._met_before = 0 if world.experiment.spread else world.experiment.meetings
        self._met = [self._met_before for _ in peers]
        self._meetings = 0
        self._last_met = [[0 for _ in peers] for _ in peers]
        self._due: list[list[_Due]] = [[] for _ in peers]
        self._joined = set(world.present)
        self._landing = False

    def period(self, number: int) -> float | None:
        """Simulate until the time at which round `number` (from 0) ends; return the mean training loss of its steps."""
        world, losses = self._world, list[float]()
        end_s = (number + 1) * world.round_s + EARLY_S
        while self._next_s() <= end_s:
            world.now_s = self._next_s()
            self._welcome()
            who = [peer for peer in self._joined if self._step_ends_s[peer] <= world.now_s + EARLY_S]
            who.sort()
            if not self._landing:
                losses += world.population.step(who, [world.lr(self._progress(peer)) for peer in who])
            self._reach_boundary(who)
            for peer in who:
                self._step_ends_s[peer] += world.links.peers[peer].step_s
        world.now_s = end_s - EARLY_S
        return sum(losses) / len(losses) if losses else None

    def land(self, number: int) -> None:
        """Let meetings go on for the time of one more round, without training."""
        if not self._world.experiment.meetings or len(self._joined) < 2:
            return
        self._landing, self._met = True, [0 for _ in self._met]
        self._round_began_s = [self._world.now_s for _ in self._round_began_s]
        self.period(number)
        self._arrive()

    def _arrive(self) -> None:
        """Wait for the corrections that are on their way, so that no side has one that the other has not."""
        under_way = [due.at_s for waiting in self._due for due in waiting]
        self._world.now_s = max([self._world.now_s, *under_way])
        self._apply(sorted(self._joined))

    def _next_s(self) -> float:
        """Return when the next step ends, or somebody comes or goes."""
        changes = self._world.presence.between(self._world.now_s, math.inf)[:1]
        return min([*(change.at_s for change in changes), *(self._step_ends_s[peer] for peer in self._joined)])

    def _welcome(self) -> None:
        """Take in who came, forget who left; a meeting under way with one who left leaves no trace."""
        world = self._world
        present = set(world.present)
        for gone in self._joined - present:
            self._due = [[due for due in waiting if due.other != gone] for waiting in self._due]
            self._due[gone] = []
        stayed = sorted(self._joined & present)
        for peer in sorted(present - self._joined):
            ready_s = world.now_s + world.welcome(peer, stayed)
            self._step_ends_s[peer] = ready_s + world.links.peers[peer].step_s
            self._round_began_s[peer] = self._ready_s[peer] = ready_s
            self._met[peer] = self._met_before
        self._joined = present

    def _progress(self, peer: int) -> float:
        """Return rounds done, with the fraction of this one that was done when the present step began."""
        began_s = self._step_ends_s[peer] - self._world.links.peers[peer].step_s
        fraction = (began_s - self._round_began_s[peer]) / self._world.round_s
        return self._world.population.states[peer].round + min(1.0, fraction)

    def _reach_boundary(self, who: list[int]) -> None:
        """Do what the daemon does between two inner steps: corrections, meetings that are due, the outer step."""
        world = self._world
        self._apply(who)
        if world.experiment.spread:
            self._meet_beside(who)
        for peer in who:
            if not self._landing and world.now_s - self._round_began_s[peer] >= world.round_s - EARLY_S:
                world.population.end_round(peer)
                self._round_began_s[peer] = world.now_s
                self._met[peer] = 0
        if not world.experiment.spread:
            self._meet_after(who)

    def _meet_beside(self, who: list[int]) -> None:
        """Let those begin a meeting whose next one of the round is due, with anybody who is free."""
        for peer in self._world.draw.sample(who, len(who)):
            if self._met[peer] < self._wanted(peer):
                self._meet(peer, who)

    def _meet_after(self, who: list[int]) -> None:
        """Hold a round's meetings at its end, one matching of those who end it together after the other."""
        for meeting in range(self._world.experiment.meetings):
            for peer in self._world.draw.sample(who, len(who)):
                if self._met[peer] <= meeting:
                    among = [other for other in self._joined if other not in who or self._met[other] <= meeting]
                    self._meet(peer, who, among)

    def _wanted(self, peer: int) -> int:
        """Return how many meetings of this round should have begun by now."""
        fraction = (self._world.now_s - self._round_began_s[peer]) / self._world.round_s
        most = float(self._world.experiment.meetings)
        if self._plans is not None:
            most = self._plans[peer].meetings
        if 0 < most < 1:  # one in several rounds
            most = 0 if self._world.population.states[peer].round % round(1 / most) else 1
        return int(min(1.0, fraction) * int(most) + 0.5)

    def _meet(self, caller: int, who: list[int], among: Collection[int] | None = None) -> None:
        """Begin a meeting, or several at once if the graph has it, with somebody among those that are there.

        who: those that are at a step boundary now. among: None takes all.
        """
        world, experiment = self._world, self._world.experiment
        if not self._is_free(caller):
            return
        among = self._joined if among is None else among
        engaged = {due.other for due in self._due[caller]}
        free = {peer for peer in among if self._is_free(peer) and self._within_reach(caller, peer)} - engaged
        self._hold(pairs(experiment.graph, caller, self._last_met[caller], free - {caller}, world.draw), who)

    def _hold(self, meetings: list[tuple[int, int]], who: list[int]) -> None:
        """Hold meetings at once, each of a caller and a callee; who: those at a step boundary now."""
        world = self._world
        held = [(pair, self._encounter(*pair)) for pair in meetings]
        at_once = max(len(self._due[peer]) for pair in meetings for peer in pair) if meetings else 0
        together = {peer for pair, _ in held for peer in pair}
        for (one, other), found in held:
            world.sent[one] += found.caller_bytes
            world.sent[other] += found.callee_bytes
            if found.correction is None:
                continue
            took_s = world.links.exchange_s(one, other, found.caller_bytes, found.callee_bytes, TURNS)
            # λ of `peer.core.gossip.laplacian`: ½ for a pair, ⅓ for two at once, 1/n for all n
            weight = world.experiment.run.outer.alpha / (len(together) + at_once)
            self._note(one, _Due(world.now_s + took_s, found.correction, -weight, other))
            self._note(other, _Due(world.now_s + took_s, found.correction, weight, one))
        self._apply([peer for peer in together if peer in who])

    def _encounter(self, caller: int, callee: int) -> Encounter:
        population, priors = self._world.population, self._priors[caller]
        allocation, budget_bytes = self._agreed(caller, callee)
        ranks = allocation.ranks(priors, population.sensitivity[caller], budget_bytes)
        found = guesses(allocation.parts(ranks, budget_bytes), priors, seed_of(self._meeting_id()))
        states, outer = population.states, self._world.experiment.run.outer
        return encounter(outer, allocation, ranks, found, states[caller], states[callee], budget_bytes)

    def _agreed(self, one: int, other: int) -> tuple[Allocation, int | None]:
        """Return what two peers' meeting is made up by, and what it may cost; None: what the codec says."""
        if self._plans is None:
            (allocation,) = self._allocations.values()
            return allocation, None
        terms = agree(self._wish(one, other), self._wish(other, one), list(self._allocations))
        return self._allocations[terms.codec], terms.budget_bytes

    def _wish(self, peer: int, partner: int) -> Terms:
        assert self._plans is not None
        planned, rate = self._plans[peer], self._world.links.bits_per_s(peer, partner)
        wish = within(planned, self._costs, min(rate, FASTEST_BITS_PER_S), self._world.round_s)
        return Terms(*wish, self._world.experiment.run.outer.alpha / 2)

    def _plan(self, peer: int) -> Plan:
        """Return what a peer's line affords, as the daemon finds it out."""
        link = self._world.links.peers[peer]
        means = Means(
            bits_per_s=min(1e6 * link.up_mbit, FASTEST_BITS_PER_S),
            waiting_s=2 * TURNS * link.latency_s,
            round_s=self._world.round_s,
            share=SHARE,
            stall_s=0.0,
            most=self._world.experiment.meetings,
        )
        return plan(means, AUTO, self._costs)

    def _meeting_id(self) -> bytes:
        return self._world.draw.randbytes(MEETING_ID_BYTES)

    def _note(self, peer: int, due: _Due) -> None:
        self._due[peer].append(due)
        self._met[peer] += 1
        self._meetings += 1
        self._last_met[peer][due.other] = self._meetings
        self._priors[peer] = next_priors(due.correction, self._priors[peer])

    def _is_free(self, peer: int) -> bool:
        here = peer in self._joined and self._ready_s[peer] <= self._world.now_s + EARLY_S
        return here and len(self._due[peer]) < SEATS

    def _within_reach(self, one: int, other: int) -> bool:
        states = self._world.population.states
        return abs(states[one].round - states[other].round) <= self._world.experiment.run.exchange.max_lag

    def _apply(self, who: list[int]) -> None:
        """Add the corrections that have arrived to weights and anchor."""
        for peer in who:
            state, waiting = self._world.population.states[peer], self._due[peer]
            for due in waiting:
                if due.at_s <= self._world.now_s + EARLY_S:
                    due.correction.add_(due.weight, state.weights, state.anchor)
            self._due[peer] = [due for due in waiting if due.at_s > self._world.now_s + EARLY_S]
