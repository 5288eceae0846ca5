"""Chooses the profile of a command, and finds its settings."""

import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from tiphys.errors import UsageError

if TYPE_CHECKING:
    from hera_pipelines.cli.cluster.config.config_file import ConfigFile

PROFILE_VARIABLE = "TIPHYS_PROFILE"
PROFILE_OPTION: ContextVar[str | None] = ContextVar("PROFILE_OPTION", default=None)
"""Value of the global option ``--profile``; None if the command line has none."""


class Setting(NamedTuple):
    """A value, and what named it."""

    value: str
    source: str
    is_lasting: bool = True
    """Whether later commands find the value again without an option."""


def choose_profile(config: "ConfigFile") -> Setting:
    """The profile of this command, from ``--profile``, ``TIPHYS_PROFILE`` or the configuration file; empty for none."""
    if option := PROFILE_OPTION.get():
        return Setting(option, "--profile", is_lasting=False)
    if variable := os.environ.get(PROFILE_VARIABLE):
        return Setting(variable, PROFILE_VARIABLE)
    return Setting(config.profile, str(config.path))


def profile_setting(key: str) -> Setting | None:
    """Value of ``key`` in the profile of this command, or the default of the configuration file; None without either.

    Raises:
        UsageError: the configuration file is invalid or has no such profile.
    """
    from hera_pipelines.cli.cluster.config.config_file import read_config_file  # imports tomllib

    config = read_config_file()
    profile = choose_profile(config)
    try:
        values = config.table(profile.value)
    except UsageError as error:
        if profile.is_lasting:
            error.add_note(f"the profile is from {profile.source}")
        raise
    if profile.value and key in values:
        return Setting(values[key], f"profile {profile.value} of {config.path}", profile.is_lasting)
    return Setting(config.defaults[key], str(config.path)) if key in config.defaults else None
