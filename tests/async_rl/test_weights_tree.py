"""Who pulls from whom: a tree drawn by hand, and for many sizes what makes the links carry one version each."""

import pytest

from async_rl.weights.tree import LEARNER, Parent, addressed, parents


def test_five_hosts_with_a_fan_out_of_two_as_drawn_by_hand():
    # stripe 0, hosts in order 0 2 4 1 3: 0 has 2 and 4, 2 has 1 and 3
    # stripe 1, hosts in order 1 3 0 2 4: 1 has 3 and 0, 3 has 2 and 4
    assert parents(5, 2) == [
        [(LEARNER, -1), (1, 0)],
        [(2, 1), (LEARNER, -1)],
        [(0, 0), (3, 1)],
        [(2, 1), (1, 0)],
        [(0, 0), (3, 1)],
    ]


def test_a_fan_out_of_one_is_a_chain():
    assert parents(4, 1) == [[(LEARNER, -1)], [(0, 0)], [(1, 1)], [(2, 2)]]


def test_no_host_and_one_host():
    assert parents(0, 3) == []
    assert parents(1, 3) == [[(LEARNER, -1)] * 3]


@pytest.mark.parametrize("fanout", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_hosts", [1, 2, 3, 5, 8, 16, 17, 100])
def test_every_stripe_reaches_every_host_and_no_link_carries_much_more_than_a_version(num_hosts, fanout):
    table = parents(num_hosts, fanout)
    sent = dict.fromkeys(range(LEARNER, num_hosts), 0)  # stripes, of which fanout are a version
    for stripe in range(fanout):
        children = dict.fromkeys(range(LEARNER, num_hosts), 0)
        for host in range(num_hosts):
            parent, depth = table[host][stripe]
            children[parent] += 1
            assert depth == -1 if parent == LEARNER else depth == 1 + table[parent][stripe][1]
            seen = [host]
            while parent != LEARNER:
                assert parent not in seen
                seen.append(parent)
                parent = table[parent][stripe][0]
            if fanout > 1:
                assert len(seen) <= 8  # 100 hosts, in twos: 1 + 2 + 4 + ... + 64
        assert max(children.values()) <= fanout
        for parent, count in children.items():
            sent[parent] += count
    assert sent[LEARNER] == fanout  # one version
    most = 2 if num_hosts < fanout * fanout else 1  # few hosts cannot be inner nodes of one tree each
    assert max(sent.values()) <= (most + 1) * fanout
    if num_hosts % fanout == 0:
        assert all(count <= fanout for count in sent.values())


def test_the_learner_is_an_empty_address():
    assert addressed([(LEARNER, -1), (1, 0)], ["tcp://a:1", "tcp://b:2"]) == (Parent("", -1), Parent("tcp://b:2", 0))
