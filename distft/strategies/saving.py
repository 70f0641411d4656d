"""Checkpoints of a strategy: `save`, `load`, `consolidate`, `reshard`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from distft.process_group import group_rank, rendezvous, together
from distft.strategies.costing import Costing
from distft.strategies.guards import check_applied
from distft.strategies.out_of_memory import explained

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from distft.checkpoint.load import LoadedState
    from distft.checkpoint.pending import PendingSave


@dataclass(frozen=True, kw_only=True, repr=False)
class Saving(Costing):
    """The part of a strategy that writes, reads and converts its runs."""

    @overload
    def save(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        step: int,
        scheduler: Any = None,
        processing_class: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        async_save: Literal[False] = False,
    ) -> Path: ...

    @overload
    def save(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        step: int,
        scheduler: Any = None,
        processing_class: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        async_save: Literal[True],
    ) -> PendingSave: ...

    @overload
    def save(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        step: int,
        scheduler: Any = None,
        processing_class: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        async_save: bool,
    ) -> Path | PendingSave: ...

    def save(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        step: int,
        scheduler: Any = None,
        processing_class: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        async_save: bool = False,
    ) -> Path | PendingSave:
        """Save everything a run needs to go on, and return the folder.

        The state is written to a temporary folder beside ``path``, checked, and renamed, so that
        ``path`` is either a whole checkpoint or not there.

        With ``async_save`` the call returns when the state is copied to memory of the host, as many
        bytes as this rank writes, which later saves use again; a thread writes the copy while
        training goes on. Its `PendingSave.result` waits for the checkpoint. The next save or load,
        and the end of the process, wait too; an error comes out there, on every rank.

        Args:
            path: The new folder.
            model: What `apply` returned.
            optimizer: What `apply` returned.
            step: Number of optimizer steps made.
            scheduler: A learning-rate scheduler, or anything with ``state_dict``.
            processing_class: A tokenizer or processor to save beside the weights.
            data: What `batches` returned, or anything with ``state_dict``.
            extra: Plain JSON values of your own.
            keep: Number of complete checkpoints of this run to keep in the folder above ``path``,
                this one among them; once it is there, those with the fewest steps go. A run is the
                same after a `load`; what others wrote there, or was copied or renamed, stays.
                None keeps all.
            async_save: Whether to write beside training.

        Raises:
            ValueError: ``path`` holds a complete checkpoint or other files; ``extra`` is no JSON.
            RuntimeError: Not every rank called, the file system is not shared, or writing failed.

        Collective: every rank.
        """
        from distft.checkpoint.save import save_checkpoint

        check_applied(self, "save", model, optimizer)
        with explained(self, "save", model, detail=f"step {step}"):
            return save_checkpoint(
                self,
                path,
                model,
                optimizer,
                step=step,
                scheduler=scheduler,
                processing_class=processing_class,
                data=data,
                extra=extra,
                keep=keep,
                async_save=async_save,
            )

    def load(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scheduler: Any = None,
        data: Any = None,
    ) -> LoadedState:
        """Load a checkpoint into a model and an optimizer that `apply` returned.

        Make the scheduler before the load: its state is set here too.

        Raises:
            ValueError: ``path`` is no checkpoint or half one, or of another model or strategy.
            RuntimeError: Not every rank called.

        Collective: every rank.
        """
        from distft.checkpoint.load import load_checkpoint

        check_applied(self, "load", model, optimizer)
        with explained(self, "load", model):
            return load_checkpoint(self, path, model, optimizer, scheduler=scheduler, data=data)

    def consolidate(self, path: str | Path, out: str | Path, **options: Any) -> Path:
        """Turn a checkpoint into one that ``from_pretrained`` reads; see `distft.consolidate`.

        Rank 0 works and the others wait.

        Raises:
            ValueError: As `distft.consolidate`.
            RuntimeError: Not every rank called.

        Collective: every rank.
        """
        from distft.checkpoint.consolidation import consolidate
        from distft.checkpoint.pending import finish_last

        rendezvous("Strategy.consolidate")
        finish_last()
        with together():
            if group_rank() == 0:
                consolidate(path, out, **options)
        return Path(out)

    def reshard(
        self, path: str | Path, out: str | Path, world_size: int | None = None, **options: Any
    ) -> Path:
        """Turn a checkpoint of any layout into one of this strategy's; see `distft.reshard`.

        Rank 0 works and the others wait.

        Args:
            path: A checkpoint, or a run's root.
            out: New folder.
            world_size: Number of ranks that will go on; default those of this group.
            options: As `distft.reshard`.

        Raises:
            ValueError: As `distft.reshard`.
            RuntimeError: Not every rank called.

        Collective: every rank.
        """
        from distft.checkpoint.pending import finish_last
        from distft.checkpoint.resharding import Source, reshard_checkpoint

        rendezvous("Strategy.reshard")
        finish_last()
        num_ranks = self.mesh(world_size).num_ranks
        with together():
            if group_rank() == 0:
                reshard_checkpoint(Source.read(path), out, self, num_ranks, **options)
        return Path(out)
