"""`RunConfig` from YAML files and `key=value` arguments, and back; a wrong name gets a suggestion."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .._errors import did_you_mean, reject
from .config import RunConfig


def run_config(settings: Mapping[str, Any]) -> RunConfig:
    """A `RunConfig` from nested dictionaries; missing keys keep their defaults."""
    if settings.get("preset") == "relufy":
        _check_relufy(settings)
    return _built(RunConfig, settings)


def _check_relufy(settings: Mapping[str, Any]) -> None:
    """Refuse preset relufy without its two settings, both in one message."""
    sections = {name: section for name, section in settings.items() if isinstance(section, Mapping)}
    missing = [
        f"{section}.{key}"
        for section, key in (("model", "init_from"), ("data", "source"))
        if not sections.get(section, {}).get(key)
    ]
    if missing:
        reject(
            "preset",
            f"'relufy' without {' and '.join(missing)}",
            "with model.init_from=MODEL, the dense checkpoint to make sparse (a folder or a Hub name), and "
            "data.source=TEXT, the kind of text that it was trained on",
        )


def _built(kind: type, settings: Mapping[str, Any], section: str = "") -> Any:
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in hints:
            name, received = (f"{section}.{key}", value) if section else ("setting", str(key))
            reject(name, repr(received), _accepted(str(key), hints))
        if not dataclasses.is_dataclass(hints[key]):
            values[key] = _converted(f"{section}.{key}".lstrip("."), value, hints[key])
        elif isinstance(value, Mapping):
            values[key] = _built(hints[key], value, key)
        else:
            reject(key, repr(value), "a section of settings")
    return kind(**values)


def _converted(name: str, value: Any, wanted: Any) -> Any:
    """`value` in the type of its field: YAML reads 1e-3 as text, and 1 as an integer."""
    options = typing.get_args(wanted) if _is_union(wanted) else (wanted,)
    if value is None and type(None) in options:
        return None
    for option in options:
        converted = _as(option, value)
        if converted is not None:
            return converted
    names = " or ".join(_name(option) for option in options)
    return reject(name, repr(value), names)


def _as(kind: Any, value: Any) -> Any:
    """`value` as a `kind`; None if it is not one."""
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, Sequence):
            return None
        items = tuple(_as(inner, item) for item in value)
        return None if None in items else items
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else None
    if kind is int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value if isinstance(value, int) else None
    if kind is float:
        try:
            return float(value)
        except (TypeError, ValueError):
            return None
    return value if isinstance(value, kind) else None


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _name(kind: Any) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}
    return names.get(kind, "a list")


def _accepted(name: str, names: Mapping[str, Any]) -> str:
    return f"one of {', '.join(names)}{did_you_mean(name, names)}"


def read_settings(path: Path) -> dict[str, Any]:
    """Read settings from a YAML file."""
    if not path.is_file():
        reject("config", str(path), "a YAML file that exists")
    try:
        settings = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        reject("config", f"{path}: {error}", "valid YAML")
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        reject("config", f"{path} with a {type(settings).__name__}", "a mapping of sections")
    return settings


def with_overrides(settings: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Settings with `section.key=value` arguments on top; a key of only one section needs no section."""
    merged = {k: dict(v) if isinstance(v, Mapping) else v for k, v in settings.items()}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            reject("override", repr(override), "key=value, such as train.steps=100")
        section, name = _place(key.strip())
        if not isinstance(merged.setdefault(section, {}), dict):
            reject("override", repr(override), f"a key of a section, not {section!r} itself")
        try:
            merged[section][name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            reject("override", repr(override), f"a value in YAML ({str(error).splitlines()[0]})")
    return merged


def _place(key: str) -> tuple[str, str]:
    """The section and name of `key`."""
    hints = typing.get_type_hints(RunConfig)
    sections = {n: typing.get_type_hints(k) for n, k in hints.items() if dataclasses.is_dataclass(k)}
    section, dot, name = key.partition(".")
    if dot:
        if section not in sections:
            reject("override", repr(key), _accepted(section, sections))
        if name not in sections[section]:
            reject("override", repr(key), _accepted(name, sections[section]))
        return section, name
    found = [(section, key) for section, names in sections.items() if key in names]
    if not found:
        every = {f"{section}.{name}": None for section, names in sections.items() for name in names}
        short = {name.split(".")[1]: name for name in every}
        near = difflib.get_close_matches(key, [*short, *every], n=1)
        hint = f"; did you mean {short.get(near[0], near[0])!r}?" if near else ""
        reject("override", repr(key), f"a setting, section.key{hint}")
    if len(found) > 1:
        names = " or ".join(f"{section}.{name}" for section, name in found)
        reject("override", repr(key), f"{names}: more than one section has it")
    return found[0]


def to_yaml(config: RunConfig) -> str:
    """Every setting, as YAML that `read_settings` reads back."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return yaml.safe_dump(plain(config.as_dict()), sort_keys=False)
