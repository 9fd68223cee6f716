"""Typed configuration: one TOML file per experiment, flags on top of it."""

from config.load import CommandLine, load_config, parse_command_line, to_toml
from config.schema import MAY_CHANGE_ON_RESUME, Config, differences

__all__ = ["MAY_CHANGE_ON_RESUME", "CommandLine", "Config", "differences", "load_config", "parse_command_line", "to_toml"]
