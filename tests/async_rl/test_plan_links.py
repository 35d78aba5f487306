"""What links carry: worked by hand for small numbers; the table of docs/scaling.md is what the functions say."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from async_rl.cli import app
from async_rl.errors import ConfigError
from async_rl.plan.links import Scale, fullest, loads, parse_parameters

SMALL = {"parameters": 1000, "step_s": 2.0, "tokens_per_step": 100, "link_bytes_s": 10_000}


def carried(scale):
    return [load.bytes_per_step for load in loads(scale)]


def test_without_relays_the_learner_sends_a_version_to_each_host():
    # W = 1000 x 2; 5 W out; no relays; 100 tokens x 13; one rank has nobody to talk to
    # the same 5 W through the chunk server's process, W through a receiver's
    assert carried(Scale(**SMALL, hosts=5)) == [10_000, 2000, 0, 1300, 0, 10_000, 2000]
    assert Scale(**SMALL, hosts=5).live_s == 1.0  # 10,000 bytes at 10,000 a second


def test_with_relays_every_link_carries_one_version():
    scale = Scale(**SMALL, hosts=5, relay=2, chunk_bytes=100)
    assert carried(scale)[:3] == [2000, 2000, 2000 * 4 / 5]
    assert scale.depth == 3  # 1 + 2 hosts are not 5
    assert scale.live_s == pytest.approx((2000 + 2 * 100) / 10_000)


def test_differences_scale_all_that_weights_need():
    assert carried(Scale(**SMALL, hosts=5, relay=2, sent=0.1))[:3] == [200, 200, 160]


def test_ranks_reduce_gradients_in_float32_and_gather_shards_in_bfloat16():
    # all-reduce of 4000 bytes over 4 ranks: 2 x 3/4 x 4000
    # sharded, 2 passes for 25 tokens: 3/4 x 1000 x (2 x (2 + 2 + 4) + 2)
    assert carried(Scale(**SMALL, ranks=4))[4] == 6000
    assert carried(Scale(**SMALL, ranks=4, sharded=True, micro_batch_tokens=13))[4] == 13_500
    assert Scale(**SMALL, ranks=4).rank_bytes == 16_000
    assert Scale(**SMALL, ranks=4, sharded=True).rank_bytes == 4000
    # the moments of a quarter; each step gathers 3/4 x 4000 bytes of parameters beside the all-reduce
    assert Scale(**SMALL, ranks=4, shard_optimizer=True).rank_bytes == 8000 + 2000
    assert carried(Scale(**SMALL, ranks=4, shard_optimizer=True))[4] == 9000


def test_where_links_are_fast_processes_are_what_is_slow():
    fast = {"parameters": 3e9, "step_s": 2.0, "tokens_per_step": 100, "link_bytes_s": 50e9, "hosts": 2, "relay": 4}
    # W = 6e9: 4 s at 1.5e9 a second with keys; 6 / 4.7 s without; two chunks of 4 MiB more are nothing
    assert Scale(**fast, keys=True).live_s == pytest.approx(4.0, rel=1e-3)
    assert Scale(**fast).live_s == pytest.approx(6 / 4.7, rel=1e-3)
    full = fullest(Scale(**fast, keys=True))
    assert (full.where, full.share) == ("chunk server, one core", 2.0)  # 3e9 a second of 1.5e9
    assert "keys" in full.remedy
    # differences of a tenth: 0.4 s to decrypt, but 6e9 / 1.2e9 s to apply
    changed = Scale(**fast, keys=True, sent=0.1)
    assert changed.live_s == pytest.approx(5.0, rel=1e-3)
    assert (fullest(changed).where, fullest(changed).share) == ("receiver, differences applied", 2.5)
    assert "weights.delta = false" in fullest(changed).remedy


def test_shares_are_of_the_link_and_the_fullest_is_named_with_its_remedy():
    full = fullest(Scale(**SMALL, hosts=5))
    assert (full.where, full.bytes_per_s, full.share) == ("learner host, out: weights", 5000, 0.5)
    assert "weights.relay" in full.remedy
    assert "weights.relay" not in fullest(Scale(**SMALL, hosts=5, relay=4)).remedy


@pytest.mark.parametrize(
    ("text", "number"), [("7B", 7e9), ("1t", 1e12), ("135M", 135e6), ("0.5B", 5e8), (" 12 ", 12.0)]
)
def test_parameters_are_written_as_people_write_them(text, number):
    assert parse_parameters(text) == number


@pytest.mark.parametrize("text", ["", "B", "-7B", "7 billion", "1e9", "7K"])
def test_what_is_no_number_of_parameters_is_refused(text):
    with pytest.raises(ConfigError, match="--parameters"):
        parse_parameters(text)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"sent": 0.0}, "--sent"), ({"step_s": 0.0}, "--step-s"), ({"link_bytes_s": 0.0}, "--link-gbit")],
)
def test_what_is_out_of_range_is_named(fields, named):
    with pytest.raises(ConfigError, match=named):
        Scale(**{**SMALL, **fields})


def test_the_command_prints_and_writes_it(tmp_path):
    out = tmp_path / "links.json"
    command = ["plan", "arithmetic", "--parameters", "7B", "--hosts", "8", "--step-s", "30", "--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--set", "model.dtype=bfloat16"])
    assert result.exit_code == 0, result.output
    told = json.loads(out.read_text())
    assert told["version_bytes"] == 14e9
    assert told["loads"][0]["bytes_per_step"] == 8 * 14e9
    assert "weights.relay" in told["words"][1]


def test_a_step_must_be_stated():
    result = CliRunner().invoke(app, ["plan", "arithmetic", "--parameters", "7B"])
    assert "--step-s" in str(result.exception) + result.output


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["lora.rank=8"], "lora.rank = 8"),
        (["weights.path=broadcast"], "weights.path = 'broadcast'"),
        (["weights.path=shm"], "weights.path = 'shm'"),
        (["weights.delta=true"], "--sent"),
    ],
)
def test_a_run_that_the_formulas_are_not_of_is_refused_rather_than_given_wrong_numbers(settings, says):
    command = ["plan", "arithmetic", "--parameters", "7B", "--step-s", "30"]
    result = CliRunner().invoke(app, [*command, *(part for setting in settings for part in ("--set", setting))])
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--parameters", "7B", "--median", "0"], "--median"),
        (["--parameters", "7B", "--median", "-5"], "--median"),
        (["--parameters", "7B", "--actors", "5"], "--actors has no effect with --parameters"),
        (["--parameters", "7B", "--from", "runs/x"], "--from has no effect with --parameters"),
        (["--tokens-per-s", "9", "--hosts", "5"], "--hosts has no effect without --parameters"),
        (["--tokens-per-s", "9", "--link-gbit", "5"], "--link-gbit has no effect without --parameters"),
    ],
)
def test_an_option_that_means_nothing_is_refused(options, says):
    result = CliRunner().invoke(app, ["plan", "arithmetic", "--step-s", "30", *options])
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)


def test_a_step_that_never_ends_is_named():
    with pytest.raises(ConfigError, match="--step-s"):
        Scale(**{**SMALL, "step_s": float("inf")})


_MANY = "ranks=512 --set buffer.groups_per_step=512 --set sampling.group_size=2"


@pytest.mark.parametrize(
    ("column", "changes"),
    [
        (0, {"70B": "7B", "--hosts 32": "--hosts 8", "--step-s 120": "--step-s 30", "ranks=64": "ranks=8"}),
        (1, {}),
        (2, {"70B": "1T", "--hosts 32": "--hosts 128", "--step-s 120": "--step-s 600", "ranks=64": _MANY}),
    ],
)
def test_the_command_of_the_page_on_scaling_gives_the_column_of_its_table(column, changes, tmp_path):
    page = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
    command = page.partition("    async-rl plan ")[2].partition("[--sent")[0].replace("\\\n", " ")
    for old, new in changes.items():
        assert old in command
        command = command.replace(old, new)
    out = tmp_path / "links.json"
    assert CliRunner().invoke(app, ["plan", *command.split(), "--out", str(out)]).exit_code == 0
    told = json.loads(out.read_text())
    rows = [row.strip(" |").split(" | ") for row in page.splitlines() if row.startswith("| ")]
    table = {row[0]: row[column + 1] for row in rows if len(row) == 4}
    shares = {load["where"].partition(",")[0]: load["share"] for load in told["loads"]}
    assert float(table["rank to ranks, `fsdp`"].partition("(")[2].rstrip(" %)")) == pytest.approx(
        100 * shares["rank"], abs=0.5
    )
    assert float(table["receiver of a host with keys, `relay = 4`"].partition("(")[2].rstrip(" %)")) == pytest.approx(
        100 * shares["receiver of a host"], abs=0.5
    )
    assert float(table["live on all hosts, `relay = 4`"].removesuffix(" s").replace(",", "")) == pytest.approx(
        told["live_s"], rel=0.005
    )


def test_the_table_of_the_page_on_scaling_is_what_the_functions_say():
    page = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
    from async_rl.plan.links_command import page_table

    assert page_table() in page
