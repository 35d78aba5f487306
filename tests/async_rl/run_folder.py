"""A small made-up run folder, with round numbers that the expected values are worked out from."""

import json

from async_rl.config import parse_config, to_toml


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(out):
    """Three steps at 100, 110 and 130 s; one learner and one actor of 40 s each, start-up 10 s."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.toml").write_text(to_toml(parse_config({"name": "made-up", "steps": 3})))
    books = {
        "issued": 10,
        "open": 1,
        "scoring": 0,
        "ready": 2,
        "delivered": 0,
        "trained": 6,
        "filtered": 1,
        "failed": 0,
    }
    (out / "books.json").write_text(
        json.dumps(
            {
                "status": "completed",
                "reason": "",
                "step": 3,
                "books": books,
                "filtered": {"zero_variance": 1},
                "failed": {},
                "refused": {"bad_shape": 2},
                "staleness": {"max": 2, "mean": 0.75, "bound": 2, "histogram": {"0": 500, "1": 250, "2": 250}},
                "tokens": {"trained": 1000, "generated": 1500},
                "weights": {
                    "bytes": 2_400_000,
                    "publish_s": 0.002,
                    "transfer_s": 0.003,
                    "commit_s": 0.001,
                    "pause_s": 0.0005,
                    "paused_s": 0.6,
                    "versions": 4,
                    "learner_bytes": 2_400_000,
                    "relay_bytes": 4_800_000,
                    "chunks": 3,
                    "delta_chunks": 2,
                    "failed_deltas": 1,
                    "relays_left": 0,
                },
            }
        )
    )
    write_lines(
        out / "metrics.jsonl",
        [
            {"step": 0, "time": 100.0, "tokens/step": 300.0, "reward/mean": 0.1, "accuracy": 0.1, "loss/policy": 0.5},
            {"step": 1, "time": 110.0, "tokens/step": 400.0, "reward/mean": 0.4, "accuracy": 0.4, "loss/policy": None},
            {"step": 2, "time": 130.0, "tokens/step": 200.0, "reward/mean": 0.9, "accuracy": 0.9, "loss/policy": 0.1},
        ],
    )
    write_lines(
        out / "evals.jsonl",
        [
            {"version": 3, "metrics": {"accuracy": 0.96, "reward": 0.97}, "wall_s": 1.0, "samples": []},
            {"version": 0, "metrics": {"accuracy": 0.5, "reward": 0.55}, "wall_s": 1.0, "samples": []},
        ],
    )
    write_lines(
        out / "timeline.jsonl",
        [
            {"name": "learner0", "role": "learner", "spans": [["starting", 90, 100], ["training", 100, 115]]},
            {"name": "actor0", "role": "actor", "spans": [["starting", 90, 100], ["generating", 100, 124]]},
            {"name": "learner0", "role": "learner", "spans": [["waiting_data", 115, 125], ["training", 125, 130]]},
            {"name": "actor0", "role": "actor", "spans": [["waiting_ticket", 124, 130]]},
        ],
    )
    write_lines(
        out / "samples.jsonl",
        [
            {
                "ordinal": 0,
                "version": 0,
                "prompt": "<script>alert('1+1=')</script>",
                "completions": ["<b>2</b>", "3 & 4"],
                "rewards": [1.0, 0.0],
            }
        ],
    )
    return out
