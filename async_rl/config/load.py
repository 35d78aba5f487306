"""From a preset or a TOML file to a checked configuration, and back to TOML."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from async_rl.config.checks import without_effect
from async_rl.config.control import ControlConfig
from async_rl.config.control_checks import control_without_effect
from async_rl.config.recipes import without_tuning
from async_rl.config.sections import Config
from async_rl.errors import ConfigError

AnyConfig = Config | ControlConfig
_Kind = TypeVar("_Kind", Config, ControlConfig)


def preset_names() -> list[str]:
    """Names of the presets that ship."""
    return sorted(p.name.removesuffix(".toml") for p in _presets().iterdir() if p.name.endswith(".toml"))


def load_config(source: str, overrides: Sequence[str] = ()) -> Config:
    """:func:`load_any` for a language model's run.

    Raises:
        ConfigError: as there, or the run controls environments.
    """
    config = load_any(source, overrides)
    if isinstance(config, ControlConfig):
        raise ConfigError(f"{source} has domain = 'control': it trains no language model")
    return config


def load_control(source: str, overrides: Sequence[str] = ()) -> ControlConfig:
    """:func:`load_any` for a run that controls environments.

    Raises:
        ConfigError: as there, or the run trains a language model.
    """
    config = load_any(source, overrides)
    if not isinstance(config, ControlConfig):
        raise ConfigError(f"{source} controls no environment: it lacks domain = 'control'")
    return config


def load_any(source: str, overrides: Sequence[str] = ()) -> AnyConfig:
    """Read a preset or a TOML file, apply ``key.path=value`` overrides, validate; ``domain`` in it says what it trains.

    A recipe that is named by an override wins over the file where the file tuned another algorithm.

    Raises:
        ConfigError: no such file, bad TOML, unknown key (names the nearest), or a value that fails its check.
    """
    path = Path(source)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"no config file {source}")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}") from None
    elif source in preset_names():
        text = (_presets() / f"{source}.toml").read_text()
    else:
        near = difflib.get_close_matches(source, preset_names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"no preset {source!r}{hint} (presets: {', '.join(preset_names())}; a file must end in .toml)"
        )
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is no TOMLDecodeError
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    if any(override.partition("=")[0].strip() == "algorithm.name" for override in overrides):
        given = dict(_parse_override(override) for override in overrides)
        raw = without_tuning(raw, given["algorithm.name"])
    for override in overrides:
        _apply(raw, override)
    return parse_control(raw) if "domain" in raw else parse_config(raw)


def parse_config(raw: dict[str, Any]) -> Config:
    """Validate a plain dictionary as a language model's run.

    Raises:
        ConfigError: every problem on its own line, unknown keys with the nearest known one.
    """
    return _validate(Config, raw)


def parse_control(raw: dict[str, Any]) -> ControlConfig:
    """Validate a plain dictionary as a run that controls environments; errors as :func:`parse_config`."""
    return _validate(ControlConfig, raw)


def _validate(kind: type[_Kind], raw: dict[str, Any]) -> _Kind:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(kind, e["loc"], e["type"], e["msg"], e.get("input")) for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def to_toml(config: AnyConfig) -> str:
    """The resolved configuration as TOML that :func:`load_config` reads back; what has no effect in it is left out."""
    lines, tables = [], []
    idle = control_without_effect(config) if isinstance(config, ControlConfig) else without_effect(config)
    for key, value in config.model_dump().items():
        if isinstance(value, dict):
            body = [f"{k} = {_toml_value(v)}" for k, v in value.items() if f"{key}.{k}" not in idle]
            tables.append("\n".join([f"[{key}]", *body]))
        else:
            lines.append(f"{key} = {_toml_value(value)}")
    return "\n".join(lines) + "\n\n" + "\n\n".join(tables) + "\n"


def _presets() -> Any:
    return resources.files("async_rl") / "presets"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # TOML wants this one escaped, JSON does not


def _apply(raw: dict[str, Any], override: str) -> None:
    """Set one key; an empty value takes it away, so that its default holds."""
    key, value = _parse_override(override)
    node, parts = raw, key.split(".")
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {part!r} is a value, not a section")
    if value is None:
        node.pop(parts[-1], None)
    else:
        node[parts[-1]] = value


def _parse_override(override: str) -> tuple[str, Any]:
    """Key and value of ``key=value``; the value is None where nothing stands behind the sign."""
    key, found, text = override.partition("=")
    if not found or not key.strip():
        raise ConfigError(f"--set {override!r}: write it as section.key=value")
    if not text.strip():
        return key.strip(), None
    try:
        return key.strip(), tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--set {override[:60]!r}: {error}") from None


def _shown(value: Any) -> str:
    """As in Python, unless it has more digits than Python shows."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


def _explain(config: type[_Kind], loc: tuple[int | str, ...], kind: str, message: str, value: Any) -> str:
    where = ".".join(str(p) for p in loc) or "config"
    if kind != "extra_forbidden":
        shown = "" if isinstance(value, dict) or not loc else f" = {_shown(value)}"
        return f"{where}{shown}: {message.removeprefix('Value error, ')}"
    section: Any = config
    for part in loc[:-1]:
        section = section.model_fields[str(part)].annotation
    near = difflib.get_close_matches(str(loc[-1]), section.model_fields, 1)
    if near:
        prefix = where.rpartition(".")[0]
        hint = f"did you mean {'.'.join(filter(None, [prefix, near[0]]))!r}?"
    else:
        hint = f"known keys: {', '.join(section.model_fields)}"
    return f"unknown key {where!r}: {hint}"
