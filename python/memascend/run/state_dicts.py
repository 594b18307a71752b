"""Reads and loads whole state dicts; gives the model real parameters for a while.

Copies lie in unlinked files beside the store, one for each parameter, so that no memory of the model's size is needed
and later steps do not change them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError, StorageError, UsageError
from memascend.residency.gates import COPIED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from memascend.residency.placeholder import Place
    from memascend.residency.residency import Residency
    from memascend.residency.unit_slot import Home
    from memascend.run.session import Session

__all__ = ["Surgery", "is_materialized", "materialized"]

_WRITE_BYTES = 8 << 20
_KEY = "memascend"
# A module's own tables of hooks.
_TABLES = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class Surgery:
    """State dicts and materialized parameters of one offloaded model."""

    def __init__(self, model: torch.nn.Module, residency: Residency, scratch: Path | None) -> None:
        """`scratch` is the folder of the copies; None where nobody named one and the storage is no folder."""
        self._residency = residency
        self._scratch = scratch
        self._session: Session | None = None
        # The module whose state dict is being made, and the copies in it.
        self._snapshot_of: torch.nn.Module | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self._loading: list[torch.nn.Module] = []
        self._changed = False
        # The first parameter that a load would have changed, and must not.
        self._refused: str | None = None

        self._model = model
        self._leave: Callable[[], None] = lambda: None
        self._enter: Callable[[], None] = lambda: None
        self._hook()

    def _hook(self) -> None:
        # Under one key, as gates do it: torch's own calls would leave a handle and a wrapper for each of them.
        before, after = self._before_state_dict, _AfterStateDict(self)
        load, loaded = self._before_load, self._after_load
        for module in self._model.modules():
            tables: Any = module.__dict__
            tables["_state_dict_pre_hooks"][_KEY] = before
            tables["_state_dict_hooks"][_KEY] = after
            tables["_load_state_dict_pre_hooks"][_KEY] = functools.partial(load, module)
            tables["_load_state_dict_post_hooks"][_KEY] = loaded

    def attach(self, session: Session, *, leave: Callable[[], None], enter: Callable[[], None]) -> None:
        """The session whose engine writes what is changed, and what makes the model a plain one and takes it back."""
        self._session = session
        self._leave = leave
        self._enter = enter

    @property
    def model(self) -> torch.nn.Module:
        """Whose state dicts these are."""
        return self._model

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(COPIED)

    def remove(self) -> None:
        """Take the hooks away."""
        for module in self._model.modules():
            for table in _TABLES:
                module.__dict__[table].pop(_KEY, None)

    # --- state dicts ----------------------------------------------------------------------

    def _before_state_dict(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        del prefix
        if self._snapshot_of is None and not keep_vars:
            self._snapshot_of = module
            self._copies = {}

    def _after_state_dict(self, module: torch.nn.Module) -> None:
        if self._snapshot_of is module:
            self._snapshot_of = None
            self._copies = {}
            self._require_session().resources.unread = False

    def forget(self) -> None:
        """A state dict that was begun and failed is over."""
        self._snapshot_of = None
        self._copies = {}
        self._loading.clear()
        if self._changed:
            # Values of a load that was interrupted are staged, and belong to no step.
            self._changed = False
            self._require_session().drop_rewritten()

    def detached(self, place: Place) -> torch.Tensor | None:
        """A private copy of a parameter where a state dict is being made; see `placeholder.Source`."""
        if self._snapshot_of is None:
            return None
        if place.name not in self._copies:
            self._copies[place.name] = self.copy_of(place)
        return self._copies[place.name].detach()

    def copy_of(self, place: Place) -> torch.Tensor:
        """A parameter's committed values in an unlinked file, as a tensor that nothing else sees."""
        if self._residency.home_of[place.name].by_rows:
            return self.mapped(place).view(place.dtype).view(place.shape)
        descriptor = _unlinked(self._folder())
        try:
            home = self._residency.home_of[place.name]
            self._residency.bind(home)
            try:
                nbytes = place.nothing.nbytes
                # No name for the values: the traceback of an error would hold them.
                _write(descriptor, _bytes_of(place.parameter.detach()), self._folder())
            finally:
                self._residency.unbind(home)
            if nbytes == 0:
                return torch.empty(place.shape, dtype=place.dtype, device="cpu")
            return _file(descriptor, nbytes).view(place.dtype).as_strided(place.shape, place.stride)
        finally:
            os.close(descriptor)

    def mapped(self, place: Place) -> torch.Tensor:
        """The bytes of an embedding that is read by rows, in an unlinked file; see `residency.Copies`."""
        nbytes, folder = place.nothing.nbytes, self._folder()
        descriptor = _unlinked(folder)
        try:

            def write(start: int, part: torch.Tensor) -> None:
                _write(descriptor, part[: nbytes - start], folder, start)

            self._each_part(place, write)
            return _file(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def _each_part(self, place: Place, visit: Callable[[int, torch.Tensor], None]) -> None:
        """Read all of an embedding that is read by rows, part by part."""
        residency = self._residency
        with residency.lock:
            if residency.closed:
                raise UsageError(residency.closed)
            residency.turns.wait_to_bind()
        assert residency.rows is not None
        residency.rows.each_part(residency.home_of[place.name].name, visit)

    def _folder(self) -> Path:
        if self._scratch is None:
            raise ConfigError("the storage is a raw device: give offload(scratch=) a folder for copies of the weights")
        return self._scratch

    # --- loading ------------------------------------------------------------------------------

    def _before_load(
        self, module: torch.nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        del state_dict, prefix, rest
        if local_metadata.get("assign_to_params_buffers"):
            raise UsageError("load_state_dict(assign=True) would replace offloaded parameters; leave assign out")
        if not self._loading:
            self._require_quiet()
        self._loading.append(module)

    def _after_load(self, module: torch.nn.Module, incompatible: Any) -> None:
        del incompatible
        if module not in self._loading:
            return
        del self._loading[self._loading.index(module) :]
        if not self._loading:
            refused, self._refused = self._refused, None
            if refused is not None:
                self._require_session().refuse_weights(refused)
            self._commit()

    def assigned(self, place: Place, values: torch.Tensor) -> bool:
        """Write values through to storage where a state dict is being loaded; see `placeholder.Source`."""
        if not self._loading:
            return False
        self._write_back(place, values)
        return True

    def _require_quiet(self) -> Session:
        session = self._require_session()
        with session.quiet():
            return session

    def _write_back(self, place: Place, values: torch.Tensor) -> None:
        """Stage other values of a parameter; where no bit differs, master and state stay untouched."""
        if tuple(values.shape) != place.shape:
            raise UsageError(f"{place.name!r} has shape {list(place.shape)}, and was given {list(values.shape)}")
        session = self._require_session()
        given = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu")
        given.copy_(values.detach())
        home = self._residency.home_of[place.name]
        if home.by_rows:
            same = self._same_parts(place, _bytes_of(given))
        else:
            self._residency.bind(home)
            try:
                same = _same_bits(place.parameter.detach(), given)
            finally:
                self._residency.unbind(home)
        if same:
            return
        if self._loading and session.weights_stand:
            # Told at the end: torch would gather an error for each parameter.
            self._refused = self._refused or place.name
            return
        session.rewrite(place.name, given)
        self._changed = True

    def _same_parts(self, place: Place, given: torch.Tensor) -> bool:
        differ = False

        def compare(start: int, part: torch.Tensor) -> None:
            nonlocal differ
            there = part[: given.nbytes - start]
            differ = differ or not torch.equal(there, given[start : start + there.nbytes])

        self._each_part(place, compare)
        return not differ

    def _require_session(self) -> Session:
        assert self._session is not None
        return self._session

    def _commit(self) -> None:
        if self._changed:
            with self._residency.turns.alone():
                self._residency.require_idle("this")
                self._changed = False
                self._require_session().commit_rewritten()

    # --- real parameters -----------------------------------------------------------------------

    @contextlib.contextmanager
    def materialized(self, *, modify: bool) -> Iterator[None]:
        """Real parameters inside."""
        if self._model in _OPEN:
            raise UsageError("materialized() within materialized(): the parameters are real already")
        session = self._require_quiet() if modify else self._require_session()
        session.require_open()
        session.frames.unwind()
        residency = self._residency
        homes: list[Home] = []
        try:
            with residency.turns.alone():
                residency.require_idle("materialized()")
                self._make_real(homes)
            # What is copied or pickled in there is a plain model.
            self.remove()
            self._leave()
            _OPEN.add(self._model)
            session.resources.unread = False
            yield
            if modify:
                session.require_open()
                values = {place.name: place.parameter.detach() for home in homes for place in home.places}
                self._release(homes)
                for home in residency.homes:
                    for place in home.places:
                        self._write_back(place, values.pop(place.name))
                self._commit()
        except BaseException:
            if self._changed:
                self._changed = False
                session.engine.discard()
            raise
        finally:
            if self._model in _OPEN:
                _OPEN.discard(self._model)
                if not session.resources.closed:
                    self._enter()
                    self._hook()
            self._release(homes)

    def _make_real(self, homes: list[Home]) -> None:
        """Let every parameter be a plain one; `homes` are those that are."""
        residency = self._residency
        for home in residency.homes:
            copies = [self.copy_of(place) for place in home.places]
            with residency.lock:
                # Its place in the arena is needed for the next one.
                residency.evict(home)
                home.bound += 1
                homes.append(home)
                for place, copy in zip(home.places, copies, strict=True):
                    place.release(copy)

    def _release(self, homes: list[Home]) -> None:
        with self._residency.turns.alone(), self._residency.lock:
            while homes:
                home = homes.pop()
                home.bound = max(0, home.bound - 1)
                for place in home.places:
                    place.unbind()


# Models whose parameters are real now.
_OPEN: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def is_materialized(model: torch.nn.Module) -> bool:
    """Whether a module, or one in it, is offloaded and within `materialized()` now."""
    return any(module in _OPEN for module in model.modules())


class _AfterStateDict:
    """A hook of its own class: torch marks it, which a method does not allow."""

    def __init__(self, surgery: Surgery) -> None:
        self._surgery = surgery

    def __call__(self, module: torch.nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        del state_dict, prefix, local_metadata
        self._surgery._after_state_dict(module)  # noqa: SLF001

    # What torch marks the hooks with that were registered by its own call.
    _from_public_api = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(COPIED)


def materialized(model: torch.nn.Module, modify: bool = False) -> contextlib.AbstractContextManager[None]:
    """Real parameters inside a `with` block: those of the last committed step.

    They lie in unlinked files, so that a model larger than memory can be looked at and saved.

    Args:
        model: an offloaded model.
        modify: write back what was changed, and commit it at once. A value whose bits did not change leaves its master
            and its state untouched.

    Raises:
        UsageError: the model is not offloaded, or a step is staged (with `modify`).
    """
    offloaded = model.__dict__.get("_memascend")
    if model in _OPEN:
        raise UsageError("materialized() within materialized(): the parameters are real already")
    if offloaded is None:
        raise UsageError("this model is not offloaded, or its optimizer was closed")
    surgery: Surgery = offloaded._session.surgery  # noqa: SLF001
    return surgery.materialized(modify=modify)


def _unlinked(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        pass
    # File systems without O_TMPFILE.
    try:
        descriptor, name = tempfile.mkstemp(prefix=".memascend-copy-", dir=folder)
    except OSError as error:
        raise _no_copy(folder, error) from error
    os.unlink(name)  # noqa: PTH108
    return descriptor


def _no_copy(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{folder}: no room for a copy of the weights: {error.strerror}; give offload(scratch=) another folder",
        errno=error.errno,
        path=str(folder),
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps as bytes, in the order in which they lie."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _file(descriptor: int, nbytes: int) -> torch.Tensor:
    """The bytes of a file, as memory."""
    with torch.inference_mode(mode=False):
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)


def _write(descriptor: int, values: torch.Tensor, folder: Path, begin: int = 0) -> None:
    """Write bytes to a file, from its byte `begin` on, and let the page cache go behind it."""
    nbytes = values.nbytes
    for start in range(0, nbytes, _WRITE_BYTES):
        length = min(_WRITE_BYTES, nbytes - start)
        # A piece at a time is in host memory where they lie on a device.
        piece = values[start : start + length].cpu()
        part = memoryview((ctypes.c_char * length).from_address(piece.data_ptr()))
        at = 0
        while at < length:
            try:
                at += os.pwrite(descriptor, part[at:], begin + start + at)
            except OSError as error:
                # The traceback would hold the values, and with them their place in memory.
                del values, piece, part
                raise _no_copy(folder, error) from error
    if nbytes > _WRITE_BYTES:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0:
        return True
    whole = torch.int16 if one.element_size() == 2 else torch.uint8
    left, right = (tensor.as_strided((tensor.numel(),), (1,)).view(whole) for tensor in (one, other))
    if left.device == right.device:
        return torch.equal(left, right)
    pieces = zip(left.split(_WRITE_BYTES), right.split(_WRITE_BYTES), strict=True)
    return all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in pieces)
