"""After a death: the next generation, the state of whoever is furthest, and on with the same steps.

    replicate   every rank holds everything. Survivors are at the same step or one apart, since a finished
                step had its sum on all of them. Whoever is furthest gives its state to those behind, and what
                a step has already done is not done twice (block.py)
    sharded     each rank holds a part that nobody else has, and keeps a copy of it (copies.py). All take the
                newest step that is complete in the copies: the step under way is made again, or nothing is.
                Parts of frozen parameters are copied once; parameters in memory that ranks share need no
                copy, since any survivor has all of them

A replacement builds its model alone and comes in at a border between steps: then all move to a generation
that includes it, in which it is one of those behind. Members that are to leave enter one more generation:
there the others get copies of what would go with them, and then they end.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from imece.checkpoint.state.names import MODEL
from imece.checkpoint.state.training_state import TrainingState
from imece.collectives import ops
from imece.collectives.calls import host_device
from imece.collectives.texts import gather_json
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.sharding.freed import FreedParameter
from imece.errors import CollectiveError, MismatchError
from imece.membership.behind import catch_up
from imece.membership.block import Block
from imece.membership.borders import Borders
from imece.membership.copies import Copies
from imece.membership.member import Member, is_peer_gone
from imece.membership.needs import Needs
from imece.membership.pieces import Pieces
from imece.membership.roster import Generation
from imece.membership.states import packed, unpacked
from imece.reading import Json
from imece.saying import say

_PATIENCE_S = 60.0  # for the launcher to see what this rank has seen
_NEWS_S = 1.0
_NO_SUMS = -1


class MovedOnError(CollectiveError):
    """There is a newer generation, and this rank leaves the old one between two collectives."""


class _OthersLeftError(MovedOnError):
    """Some members have left in order: a generation without them is on its way."""


@dataclass(frozen=True)
class Recovered:
    """How this rank came into its generation."""

    generation: Generation
    step: int
    """Finished steps of all ranks, from here on."""
    lost_steps: int
    """Steps that some rank had finished and that all make again."""
    seconds: float
    """Seconds since this rank noticed."""


class LostStateError(RuntimeError):
    """Nobody has this state in memory any more; a checkpoint may have it."""


class Recovery:
    """Keeps one wrapped model and its optimizers going while members of its world die and join.

    Call `border` after every step, and `recover` after an error. state: returns what belongs to a step
    besides tensors, which is small; take: receives that of the rank that is furthest.
    """

    def __init__(
        self,
        member: Member,
        model: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        *,
        state: Callable[[], Json],
        take: Callable[[Json], None],
        fallback: Callable[[], int] | None = None,
        frozen: bool = True,
    ) -> None:
        """fallback: loads a checkpoint on all ranks, and returns its number of steps.

        frozen: False if whoever joins has the parameters that are not trained already.
        """
        self.member, self._model = member, model
        self._training_state, self._frozen = TrainingState(model, list(optimizers)), frozen
        self._state, self._take, self._fallback = state, take, fallback
        self._optimizers = list(optimizers)
        self._sharded = model if isinstance(model, ShardedDataParallel) else None
        self._copies = Copies(member.mesh, member.aborting.check)
        self._block = None if self._sharded is not None else Block(model.module, self._optimizers)
        self._borders = Borders()
        member.aborting.before_updates(self._optimizers, model.device)
        member.where.watch(model, self._optimizers)
        self._fits = True
        self._has_frozen = False  # has all frozen parameters, of which others have parts
        self._asked = False  # a rank of this host asked for new copies before the last step
        self._sums = _NO_SUMS  # finished sums of this generation, at the last copy
        self._again: int | None = None  # steps to make again, until this generation has finished one
        self._states: dict[str, str] = {}  # packed states by finished steps, the last three
        self.without_copies = self._no_copies_at_all
        """Why there are no copies, the same on all ranks; "" if there are."""

    @property
    def needs_copies(self) -> bool:
        """Whether a rank holds what no other one does."""
        return self._sharded is not None and not self._is_alone

    @property
    def _no_copies_at_all(self) -> str:
        """Why no copies can be made, however much memory there is; "" if they can."""
        return "" if self._sharded is not None else "every rank holds everything"

    @property
    def _is_alone(self) -> bool:
        return self._model.process_group.size() == 1

    def begin(self, step: int) -> None:
        """All ranks of this generation are here, with `step` finished steps; call `go_on` next."""
        self._exchange(step)
        self.note_state(step)
        if self._block is not None:
            self._block.begin()
        self.member.steps = step
        self._borders.begin(step)

    def go_on(self) -> None:
        """From now on this rank calls `recover`, whatever it is in the middle of."""
        self.member.goes_on()

    def finished(self, step: int) -> None:
        """This rank has finished so many steps: copy what it alone holds. PeerLostError if it has not made
        the last update, since its sums were aborted."""
        self.member.aborting.finish()
        self.member.steps = step
        self.member.where.note("between steps")
        if self._again is not None:
            self.member.went_on(self._again)
            self._again = None
        # Three: copies that a rank could not write are two steps behind until all have exchanged new ones.
        self._states = {key: each for key, each in self._states.items() if step - 2 <= int(key) < step}
        self.note_state(step)
        if self._block is not None:
            self._block.begin()
        if not self.without_copies and not self._is_alone:
            self._copy(step)

    def note_state(self, step: int) -> None:
        """Note the present state as that of so many finished steps. `begin` and `finished` have noted
        it once."""
        self._states[str(step)] = packed(self._state())

    def is_as_noted(self, step: int) -> bool:
        """Whether the state that belongs to so many finished steps has not changed since."""
        return packed(self._state()) == self._states[str(step)]

    def says(self) -> tuple[float, float]:
        """For the border: the newest generation, and whether copies must be made anew."""
        return float(self.member.newest), float(not self._fits)

    def border(self, step: int, newest: float, anew: float) -> bool:
        """After `step` steps, with the largest values that any rank said. Returns whether all should move
        on now."""
        if anew:
            self._exchange(step)
        return newest > self.member.generation

    def meet(self, step: int, anyway: bool) -> None:
        """`border` for loops without a collective of their own to carry it. MovedOnError if all move on.

        It runs at some borders (borders.py), and `anyway` after the last step: what follows is not protected,
        so all must have come that far. If several hosts keep copies it runs at every border: ranks do not see
        when ranks of another host ask for new copies.
        """
        if not anyway and not self._asked and not self._borders.is_due(step):
            return
        model = self._model
        seldom = self.without_copies or len(self.member.mesh.hosts) == 1
        again = self._borders.wished(step) if seldom else 1
        if anyway:
            self.member.aborting.settle(model.device)
        device = host_device(model.process_group, model.device)
        mine = torch.tensor((*self.says(), -again), dtype=torch.float64, device=device)
        ops.all_reduce(mine, "max", group=model.process_group, label="border between steps")
        newest, anew, again = mine.tolist()
        self.member.aborting.check()
        self._borders.agreed(step, -int(again))
        if self.border(step, newest, anew):
            raise MovedOnError(f"generation {int(newest)} takes over after step {step}")

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, this rank saves: whoever asks where it died is told so."""
        self.member.where.note("saving")
        yield
        self.member.where.note("between steps")

    def end(self) -> None:
        """The steps are over: from now on one death ends the job, as the programs may do anything."""
        self.member.goes_on(False)

    @property
    def is_over(self) -> bool:
        """Whether this generation is over: somebody has ended, or waits to be taken in."""
        return self.member.newest > self.member.generation

    def recover(self, error: BaseException | None, step: int) -> Recovered:
        """Into the next generation, after `error`; None: this member joins. step: finished steps of
        this rank.

        Raises `error` itself if no member is gone. LostStateError if nobody has the state of all parts.
        SystemExit, with status 0, for a member that was to leave: the others have what it had.
        """
        began = time.monotonic()
        step = min(step, self.member.steps)  # minus one that `finished` has refused
        if error is not None and self._is_alone:
            if not isinstance(error, CollectiveError):
                raise error  # there is no peer to lose, whatever the error says
            self._exchange(step)  # until now nobody could have gone on with a copy
        lost_steps = 0
        while True:
            patience_s = self._patience(error)
            if error is not None:
                traceback.clear_frames(error.__traceback__)  # frames hold groups, which must end
            generation = self.member.move(patience_s, self._model.leave)
            if generation is None:
                assert error is not None
                raise error
            try:
                step, lost = self._take_over(step)
                lost_steps += lost
                self.member.goes_on()  # before the launcher counts on it because of its steps
                self.member.steps = step
                if generation.leaving:
                    self._let_leave(generation, step)
            except RuntimeError as another:
                error = another
                continue
            self._borders.begin(step)
            self._again = lost_steps
            return Recovered(generation, step, lost_steps, time.monotonic() - began)

    def _patience(self, error: BaseException | None) -> float:
        """How long the launcher may take to see a death behind `error`. Raises `error` if there can
        be none."""
        if isinstance(error, _OthersLeftError):
            return math.inf  # the launcher has to say when they are gone
        if error is None or is_peer_gone(error) or isinstance(error, MovedOnError):
            return _PATIENCE_S
        if self.member.aborting.has_aborted:  # the error may come from anything left in the GPU's buffers
            return _PATIENCE_S
        if isinstance(error, CollectiveError) and not isinstance(error, MismatchError):
            return _NEWS_S
        raise error

    def _take_over(self, step: int) -> tuple[int, int]:
        """(finished steps of all from now on, how many more the furthest rank had)."""
        mesh, model, sharded = self.member.mesh, self._model, self._sharded
        self._training_state.forget()  # the parts that `regroup` cuts anew
        self._copies.forget()
        updates = self._block.updates if self._block is not None else []
        far = [step, sum(updates)]
        mine = {
            "far": far, "updates": updates, "states": self._states, "copies": self._copies.note(),
            "has_frozen": self._has_frozen,
        }  # fmt: skip
        notes: list[Json] = gather_json(mine, mesh.world_group, mesh.device, "how far each rank is")
        if sharded is not None:
            have = [rank for rank, note in enumerate(notes) if note["has_frozen"]]
            try:
                sharded.regroup(mesh, spread=True, has_frozen=min(have, default=None))
            finally:  # until there are copies, what is in parts may be lost with the next rank that dies
                frozen = (each for each in sharded.module.parameters() if not each.requires_grad)
                self._has_frozen &= not any(isinstance(each, FreedParameter) for each in frozen)
        else:
            model.regroup(mesh)
        furthest = max(range(len(notes)), key=lambda rank: (notes[rank]["far"], -rank))
        furthest_far = notes[furthest]["far"]
        most = int(furthest_far[0])
        if sharded is not None:
            begin = self._from_copies(sharded, notes, furthest)
            sharded.sync_rest(furthest)
            self.member.aborting.settle(model.device)
        else:
            assert self._block is not None
            begin = most
            self._block.take_back()
            if any(note["far"] < furthest_far for note in notes):
                behind = far < furthest_far
                catch_up(
                    self._training_state, furthest, behind, mesh.world_group, model.device,
                    frozen=self._frozen, check=self.member.aborting.check,
                )  # fmt: skip
            self._block.begin(notes[furthest]["updates"])
        state = notes[furthest]["states"].get(str(begin))
        if state is None:  # back at a checkpoint: a rank that joins has read it
            mine_now = packed(self._state())
            state = gather_json(mine_now, mesh.world_group, mesh.device, "state of the checkpoint")[furthest]
        self._take(unpacked(state))
        self._states[str(begin)] = state
        self._asked, self._sums = False, _NO_SUMS
        self.without_copies = self._no_copies_at_all  # newcomers do not know that memory was lacking
        self._exchange(begin)
        self._states = {str(begin): state}  # not before: with another death all may be back at an older copy
        return begin, most - begin

    def _from_copies(self, model: ShardedDataParallel, notes: list[Json], furthest: int) -> int:
        """The step that all have from now on. furthest: the rank that has made most steps."""
        needs = Needs(model, self._optimizers)
        found = self._copies.recovered([note["copies"] for note in notes], needs, model.device)
        kept = any(note["has_frozen"] for note in notes)
        if found is not None and not kept and self._lacks(model, found[1]):
            found = None
        if found is None:
            if self._fallback is not None:
                return self._fallback()
            raise LostStateError(
                "a rank that is gone held a part of the model, and with it went every copy of it: what was "
                f"learned until step {notes[furthest]['far'][0]} is lost, but for what a checkpoint has"
            )
        step, pieces = found
        assert str(step) in notes[furthest]["states"], f"nobody noted what belongs to step {step} besides"
        self._training_state.load(pieces, frozen=False)
        ops.barrier(group=self.member.mesh.world_group)  # nobody lets go of what another rank still reads
        return step

    def _lacks(self, model: ShardedDataParallel, pieces: Pieces) -> bool:
        """Whether copies lack frozen parameters that a rank needs a part of. All ranks call this."""
        if not model.frozen_names:
            return False
        mesh, names = self.member.mesh, {*pieces.names()}
        mine = [part.name for part in model.frozen_parts if MODEL + part.name not in names]
        return any(gather_json(mine, mesh.world_group, mesh.device, "frozen parameters that are lost"))

    def _copy(self, step: int) -> None:
        """Copy what this rank alone holds, unless all must exchange copies first."""
        sums = self._model.reducer.sums
        if sums == self._sums:
            ops.barrier(group=self._model.process_group)  # without a sum nobody knows how far all are
        self._sums = sums
        self._asked = self._copies.asked(step)
        self._fits = not self._asked and self._copies.write(step, self._training_state.own())

    def _exchange(self, step: int) -> None:
        model = self._sharded
        if model is None:
            return
        self._has_frozen = model.sharding.common_parameters and bool(model.frozen_names)
        if self.without_copies:
            return
        shared_out = model.sharding.groups.shard
        place = shared_out.rank(), shared_out.size()
        state = self._training_state
        self.without_copies = self._copies.exchange(step, state.own(), place, state.still())
        self._fits = True

    def _let_leave(self, generation: Generation, step: int) -> None:
        """Some members go: first they hand over what they alone hold. Always raises."""
        leaving = {
            generation.members.index(each) for each in generation.leaving if each in generation.members
        }
        mesh = self.member.mesh
        if not self.without_copies:
            why = self._copies.hand_over(step, leaving, self._model.device)
            if why and mesh.rank == 0:
                say(f"what leaving ranks hold cannot be taken over: {why}")
        with contextlib.suppress(CollectiveError):  # some have passed it, and have ended already
            ops.barrier(group=mesh.world_group)
        if mesh.rank in leaving:
            raise SystemExit(0)
        raise _OthersLeftError(f"{len(leaving)} ranks have left after step {step}")
