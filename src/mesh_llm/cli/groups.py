"""Verbs with verbs of their own; each is imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from mesh_llm.cli.imports import import_quickly

_HELP = {"--help", "-h"}


class ImportedVerbs(click.Group):
    """`modules` names each command's module, which has the command by that name."""

    def __init__(
        self, *args: Any, modules: Mapping[str, str], default: str | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._modules = modules
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.default is not None and (not args or args[0] not in {*self._modules, *_HELP}):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self._modules:
            return None
        command = getattr(import_quickly(f"mesh_llm.cli.{self._modules[name]}"), name)
        assert isinstance(command, click.Command)
        return command
