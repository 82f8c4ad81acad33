"""The configuration: one TOML file, overridden by ``STAGER_<SECTION>__<KEY>``. All its problems are told at once."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from stager.errors import ConfigError
from stager.formats.layouts.detection import AUTO, check_layout_name
from stager.units import parse_rate, parse_size

ENVIRONMENT_PREFIX = "STAGER_"
_OVERRIDDEN = ("node", "store", "limits", "log")

Size = Annotated[int, BeforeValidator(parse_size)]
Rate = Annotated[int | None, BeforeValidator(parse_rate)]


def _absolute(path: object) -> object:
    if isinstance(path, str) and not os.path.isabs(path):
        raise ValueError(f"`{path}` is not an absolute path")
    return os.path.normpath(path) if isinstance(path, str) and path else path


UrlCheck = Callable[[str], str]
"""What is wrong with a store's URL, or nothing. Whoever knows stores hands it in: the configuration does not."""


def _named_store(url: str, info: ValidationInfo) -> str:
    check: UrlCheck | None = (info.context or {}).get("check_url")
    problem = check(url) if check else ""
    if problem:
        raise ValueError(problem)
    return url


def _known_layout(name: str) -> str:
    try:
        return check_layout_name(name)
    except ConfigError as error:
        raise ValueError(f"{error.message}; {error.hint}") from None


S = TypeVar("S", bound=BaseModel)
Url = Annotated[str, Field(min_length=1), AfterValidator(_named_store)]
Path = Annotated[str, BeforeValidator(_absolute)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeSection(_Section):
    """``[node]``: this node's cache and socket, and its place among the nodes."""

    cache: Path
    cache_bytes: Size
    socket: Path
    node_index: int = Field(default=0, ge=0)
    node_count: int = Field(default=1, ge=1)
    drain_timeout_s: float = Field(default=25.0, gt=0, le=86_400)
    memory_bytes: Size = 128 << 20
    concurrent_shards: int = Field(default=4, ge=1, le=256)
    concurrent_parts: int = Field(default=8, ge=1, le=256)

    @model_validator(mode="after")
    def _node_is_one_of_them(self) -> NodeSection:
        if self.node_index >= self.node_count:
            raise ValueError(
                f"node_index {self.node_index} is not one of {self.node_count} nodes, counted from 0"
            )
        # Linux keeps 108 bytes for a socket's path, the closing zero included.
        if len(self.socket.encode()) > 107:
            raise ValueError(
                f"socket: the path has {len(self.socket.encode())} bytes; a socket's may have 107"
            )
        return self


class StoreSection(_Section):
    """``[store]``: how buckets are reached. What is left out is found by the SDK's own chain."""

    provider: str = ""
    region: str = ""
    endpoint: str = ""
    profile: str = ""
    access_key: SecretStr = SecretStr("")
    secret_key: SecretStr = SecretStr("")
    session_token: SecretStr = SecretStr("")
    kms_key: str = ""

    @model_validator(mode="after")
    def _keys_come_together(self) -> StoreSection:
        if bool(self.access_key.get_secret_value()) != bool(self.secret_key.get_secret_value()):
            raise ValueError("access_key and secret_key come together, or neither does")
        return self


class DatasetSection(_Section):
    """``[[dataset]]``: staged from the start, before any reader announces itself."""

    source: Url


class BestSection(_Section):
    """The best by a metric that the trainer gave to `stager.commit` or a callback."""

    metric: str = Field(min_length=1)
    count: int = Field(default=1, ge=1)
    mode: Literal["min", "max"] = "min"


class KeepSection(_Section):
    """What a tier keeps; any rule keeps a checkpoint. Without one, everything is kept."""

    last: int | None = Field(default=None, ge=1)
    every_steps: int | None = Field(default=None, ge=1)
    every_hours: float | None = Field(default=None, gt=0)
    best: BestSection | None = None
    names: tuple[str, ...] = ()


class TierSection(_Section):
    """One tier of a run's checkpoints: a directory, or a bucket."""

    path: Path = ""
    url: Annotated[str, AfterValidator(_named_store)] = ""
    keep: KeepSection = KeepSection()
    storage_class: str = ""

    @model_validator(mode="after")
    def _one_place(self) -> TierSection:
        if bool(self.path) == bool(self.url):
            raise ValueError("a tier has either a `path`, a directory, or a `url`")
        if self.storage_class and not self.url.startswith("s3://"):
            raise ValueError("storage_class is for buckets: only an s3:// url has classes")
        return self

    @property
    def location(self) -> str:
        """Path or URL."""
        return self.path or self.url


class CheckpointSection(_Section):
    """``[[checkpoint]]``: a directory that trainers save into, and where its checkpoints go."""

    watch: Path
    run: Url
    layout: Annotated[str, AfterValidator(_known_layout)] = AUTO
    tiers: tuple[TierSection, ...] = ()
    keep_local: int | None = Field(default=None, ge=1)
    rescan_s: float = Field(default=5.0, gt=0, le=3600)

    @model_validator(mode="after")
    def _tiers_fit(self) -> CheckpointSection:
        places = [tier.location.rstrip("/") for tier in self.tiers]
        if self.tiers and self.run.rstrip("/") not in places:
            raise ValueError(f"tiers: one of them has to be the run `{self.run}` itself")
        if len(set(places)) != len(places):
            raise ValueError("tiers: two of them are one place")
        for tier in self.tiers:
            if tier.path and (_is_within(tier.path, self.watch) or _is_within(self.watch, tier.path)):
                raise ValueError(f"tiers: of `{tier.path}` and the watched folder one lies in the other")
        return self

    @property
    def all_tiers(self) -> tuple[TierSection, ...]:
        """From the nearest to the trainer on; the run itself where none are named."""
        if self.tiers:
            return self.tiers
        return (TierSection(path=self.run) if os.path.isabs(self.run) else TierSection(url=self.run),)


class LimitsSection(_Section):
    """``[limits]``: caps on bytes a second."""

    upload: Rate = None
    download: Rate = None


class LogSection(_Section):
    """``[log]``: to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["logfmt", "json"] = "logfmt"


class Config(_Section):
    """Everything a daemon is told."""

    node: NodeSection
    store: StoreSection = StoreSection()
    dataset: tuple[DatasetSection, ...] = ()
    checkpoint: tuple[CheckpointSection, ...] = ()
    limits: LimitsSection = LimitsSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        problems = []
        for number, section in enumerate(self.checkpoint):
            place, watch = f"checkpoint[{number}]", section.watch
            if _is_within(watch, self.node.cache):
                problems.append(f"{place}.watch: `{watch}` lies in the cache, which stager tidies")
            elif _is_within(self.node.cache, watch):
                problems.append(f"{place}.watch: the cache `{self.node.cache}` lies in `{watch}`")
            problems += [
                f"{place}.tiers: `{tier.path}` lies in the cache, which stager tidies"
                for tier in section.tiers
                if tier.path and _is_within(tier.path, self.node.cache)
            ]
            for other in self.checkpoint[:number]:
                if other.watch == watch:
                    problems.append(f"{place}.watch: `{watch}` is watched twice")
                elif _is_within(watch, other.watch) or _is_within(other.watch, watch):
                    # The outer one would take the inner folder for a checkpoint.
                    problems.append(
                        f"{place}.watch: of `{watch}` and `{other.watch}` one lies in the other; watch folders side by side"
                    )
                for shared in sorted(_places_of(section) & _places_of(other)):
                    problems.append(
                        f"{place}.run: two folders go into the run `{shared}`; give each a run of its own"
                    )
        if problems:
            raise ValueError("\n".join(problems))
        return self


class _Checkpoints(_Section):
    checkpoint: tuple[CheckpointSection, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and for each key that was given, where it came from."""

    config: Config
    origins: Mapping[str, str]


def load_config(
    path: str, environment: Mapping[str, str] | None = None, *, check_url: UrlCheck | None = None
) -> LoadedConfig:
    """The configuration in the file ``path``, with the overrides of ``environment`` (the process's own when None).

    With ``check_url``, stores' URLs are looked at as well.

    Raises:
        ConfigError: With every problem, each on a line with its place.
    """
    document = _read(path)
    origins = {place: path for place in _places(document)}
    given = os.environ if environment is None else environment
    origins |= _override(document, given)
    # A misspelt variable is a key that does not exist, as it would be in the file.
    document |= {name: value for name, value in given.items() if _overrides_nothing(name)}
    return LoadedConfig(_validated(Config, document, of=path, check_url=check_url), origins)


def load_store_section(path: str | None, environment: Mapping[str, str] | None = None) -> StoreSection:
    """Only ``[store]``, for commands that need no daemon: from the file, if one is named, and the environment.

    Raises:
        ConfigError: With every problem of that section.
    """
    document = {} if path is None else _read(path)
    _override(document, os.environ if environment is None else environment)
    return _validated(StoreSection, document.get("store", {}), of=path or "the environment")


def load_checkpoint_section(path: str | None, run: str) -> CheckpointSection | None:
    """The ``[[checkpoint]]`` of a file that has a tier at ``run``, for commands that need no daemon; None if there is none.

    Raises:
        ConfigError: With every problem of these sections.
    """
    document = {} if path is None else _read(path)
    given = {"checkpoint": document.get("checkpoint", ())}
    sections = _validated(_Checkpoints, given, of=path or "").checkpoint
    place = run.rstrip("/")
    return next((section for section in sections if place in _places_of(section)), None)


def check_config(document: Mapping[str, Any], *, of: str) -> Config:
    """The configuration in a parsed document; ConfigError with every problem."""
    return _validated(Config, document, of=of)


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration `{path}`", subject=path, hint="name one with --config"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read `{path}`: {error.strerror}",
            subject=path,
            hint="check that it is a file, and its mode for the user that stager runs as",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"`{path}` is not TOML: {error}",
            subject=path,
            hint="text stands in quotes, sections in brackets; the README has an example",
        ) from None


def _places_of(section: CheckpointSection) -> set[str]:
    return {tier.location.rstrip("/") for tier in section.all_tiers}


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _validated(model: type[S], document: object, *, of: str, check_url: UrlCheck | None = None) -> S:
    try:
        return model.model_validate(document, context={"check_url": check_url})
    except ValidationError as error:
        details = [dict(detail) for detail in error.errors(include_url=False, include_input=False)]
        told = [_problem(detail, model) for detail in details]
        problems = [line.strip() for problem in told for line in problem.splitlines()]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(
            f"`{of}` has {count}:\n" + "\n".join(f"  {problem}" for problem in problems),
            subject=of,
            hint="once they are put right, `stager config show --config FILE` prints every setting, defaults too",
        ) from None


def _problem(detail: dict[str, Any], model: type[BaseModel]) -> str:
    place = ""
    for part in detail["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    if detail["type"] == "extra_forbidden":
        said = "there is no such key" + _did_you_mean(detail["loc"], model)
    elif detail["type"] == "tuple_type":
        said = f"there may be several: write [[{place}]]" if len(detail["loc"]) == 1 else "is a list: [...]"
    elif detail["type"] == "missing":
        said = "is missing"
    else:
        said = str(detail["msg"]).removeprefix("Value error, ")
    # What concerns several sections names its places itself.
    return f"{place}: {said}" if place else said


def _did_you_mean(place: tuple[str | int, ...], model: type[BaseModel]) -> str:
    """``; did you mean `x`?`` of the keys that the section of ``place`` has, or all of them."""
    section: Any = model
    for part in place[:-1]:
        if isinstance(part, str):
            section = section.model_fields[part].annotation
        else:
            section = get_args(section)[0]
    near = difflib.get_close_matches(str(place[-1]), list(section.model_fields), n=1)
    return f"; did you mean `{near[0]}`?" if near else f"; there are {', '.join(section.model_fields)}"


def _override(document: dict[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Put ``STAGER_NODE__CACHE=...`` and the like into the document; returns where each came from."""
    origins = {}
    for name, value in environment.items():
        section, key = _section_and_key(name)
        if section not in _OVERRIDDEN:
            continue
        place = document.setdefault(section, {})
        if isinstance(place, dict):
            place[key] = value
            origins[f"{section}.{key}"] = f"environment {name}"
    return origins


def _section_and_key(name: str) -> tuple[str, str]:
    """Of a variable's name; two empty texts if it is not one of ours."""
    section, divider, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
    return (section, key) if name.startswith(ENVIRONMENT_PREFIX) and divider else ("", "")


def _overrides_nothing(name: str) -> bool:
    section, _ = _section_and_key(name)
    return bool(section) and section not in _OVERRIDDEN


def _places(value: object, place: str = "") -> list[str]:
    if isinstance(value, dict):
        return [
            found
            for key, inner in value.items()
            for found in _places(inner, f"{place}.{key}" if place else key)
        ]
    if isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
        return [found for number, inner in enumerate(value) for found in _places(inner, f"{place}[{number}]")]
    return [place]
