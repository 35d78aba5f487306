"""Who may come in: the checks of a ``hello``, each with the sentence that the client prints. Pure."""

from __future__ import annotations

from collections.abc import Collection

from async_rl.buffer.fields import shown, take
from async_rl.config import Config, RunConfig
from async_rl.protocol import PROTOCOL_VERSION, ROLES, STAGES
from async_rl.wire import SCHEMA_VERSION, Header

_CONTROL = "environment, observations, networks, episodes or seed"


def refusal(hello: Header, config: RunConfig, worlds: Collection[int], base: str = "") -> str:
    """Why this client cannot take part; empty if it can.

    Args:
        hello: its first message.
        config: of the run.
        worlds: group sizes that the connected learner ranks named.
        base: checksum of the model to which an adapter is trained; empty: none is trained.

    Raises:
        WireError: a field is missing or of the wrong type.
    """
    protocol, schema, contract = (hello.get(k) for k in ("protocol", "schema", "contract"))
    if protocol != PROTOCOL_VERSION or schema != SCHEMA_VERSION:
        return (
            f"the server speaks protocol {PROTOCOL_VERSION} with schema {SCHEMA_VERSION}, you speak {shown(protocol)} "
            f"with {shown(schema)}: install the same version of async-rl on both hosts"
        )
    if contract != config.contract_hash():
        what = _CONTROL if config.is_control else "model, adapter (lora), task, sampling, rewards, reference or seed"
        return (
            f"{what} differ between your configuration (contract "
            f"{shown(contract)!r}) and the server's ({config.contract_hash()!r}): start both from the same config.toml"
        )
    name = take(hello, "name", str)
    if hello.get("role") not in ROLES or not 0 < len(name) <= 200 or not name.isprintable():  # it goes into logs
        return f"a client needs a name of 1 to 200 printable characters and a role of {', '.join(ROLES)}"
    others = [take(hello, field, str, "") for field in ("host", "stage", "group")]
    if max(map(len, others)) > 200 or not all(map(str.isprintable, others)):
        return "a client's host, stage and group have at most 200 printable characters"
    if base and hello["role"] not in ("monitor", "recruit") and take(hello, "base", str, "") != base:
        return _other_base(hello, base)
    if hello["role"] == "scorer":
        return _scorer_refusal(hello, config)
    if hello["role"] == "recruit":
        return _learner_refusal(hello, config, ())
    return _learner_refusal(hello, config, worlds) if hello["role"] == "learner" else ""


def _other_base(hello: Header, base: str) -> str:
    return (
        f"the model of your model.path (checksum {shown(hello.get('base', ''))!r}) is not the one that the server has "
        f"({base!r}), and with lora.rank above 0 only the adapter is sent: copy the folder from the learner's host"
    )


def _scorer_refusal(hello: Header, config: RunConfig) -> str:
    stage = take(hello, "stage", str)
    if not isinstance(config, Config):
        return "this run controls environments, which give their rewards themselves: it has no work for scorers"
    if stage not in STAGES:
        return f"a scorer needs a stage: {' or '.join(STAGES)}"
    if stage in config.stages:
        return ""
    if stage == "reference" and not config.needs_reference:
        return "this run needs no reference: set algorithm.kl_coef above 0, or algorithm.name = 'distillation'"
    return (
        f"this run has no work for a {stage} scorer: set {stage}.placement = 'scorer' (it is "
        f"{getattr(config, stage).placement!r}) and start the run anew"
    )


def _learner_refusal(hello: Header, config: RunConfig, worlds: Collection[int]) -> str:
    rank, world = take(hello, "rank", int, 0), take(hello, "world", int, 1)
    most = config.buffer.groups_per_step // config.split_minibatches
    if not 0 <= rank < world <= most:
        return f"rank {rank} of {world}: a mini-batch of {most} groups feeds 1 to {most} ranks"
    others = set(worlds) - {world}
    if others:
        return f"this rank belongs to a group of {world}, the connected ones to a group of {others.pop()}"
    return ""
