"""How often the books are written: at once after each step, unless there are many steps in a second."""

import json

from server_helpers import config
from service_helpers import Bench


def test_books_of_many_steps_in_a_second_are_written_for_the_first_eight_and_then_once_a_second(tmp_path):
    settings = config(steps=40, buffer={"groups_per_step": 1, "max_staleness": 1})
    bench = Bench(settings, tmp_path)
    bench.learner()
    bench.join("actor", "a")
    bench.live("a", 0)

    def told():
        return json.loads((tmp_path / "books.json").read_text())["step"]

    def train(step):
        bench.submit("a", bench.tickets("a", 1))
        assert len(bench.shard(step)) == 1
        bench.train(step)
        bench.live("a", step + 1)
        return told()

    assert [train(step) for step in range(12)] == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]
    bench.tick(1.0, beating=("a", "l"))
    assert told() == 12
    assert train(12) == 12
    bench.service.close()
    assert told() == 13
