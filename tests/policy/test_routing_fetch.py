"""A rank fetches the routing of one mini-batch ahead, and releases what it has used."""

import threading

import pytest

from megastep.policy.routing_fetch import RoutingFetch
from megastep.samples import lay_out
from megastep.samples.routing import Layout, routing_of_batches, tables_of
from tests.samples.rollouts import by_reference, resolver, samples_of
from tests.samples.test_routing import turns

STAGES = [(0,), (1,)]


class Store:
    """The objects of three mini-batches of a group each; records what is asked for."""

    def __init__(self):
        self.references: dict = {}
        self.asked: list[list[str]] = []
        self.changed = threading.Condition()
        self.mini_batches = []
        for id in range(3):
            group = turns(([1, 2, 3], [5, 6]), ([1, 2, 3], [7, 8]))
            group.id = id
            stored = by_reference(group, Layout(STAGES, whole_tokens=100), self.references)
            [batches], _ = lay_out(samples_of(stored), 1, 100)
            self.mini_batches.append(batches)
        self.tables = [tables_of(routing_of_batches(batches)) for batches in self.mini_batches]

    def get(self, names: list) -> list:
        with self.changed:
            self.asked += [[name] for name in names]
            self.changed.notify_all()
        return resolver(self.references)(names)

    def wait_for(self, name: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: [name] in self.asked, timeout=10), self.asked

    def fetch(self, stage: int = 1, layers=(1,)) -> RoutingFetch:
        references = [table.references[stage] for (table,) in self.tables]
        return RoutingFetch(self.mini_batches, references, stage, layers, self.get)


def test_routing_is_fetched_one_mini_batch_ahead_and_released():
    store = Store()
    routing = store.fetch()
    for i, batches in enumerate(routing.one_ahead(store.mini_batches)):
        assert batches is store.mini_batches[i]
        assert batches[0].trie.routing(slice(1, 2)) is not None
        if i < 2:
            store.wait_for(f"{i + 1}/1/0")  # while this one is used
        assert [f"{i + 2}/1/0"] not in store.asked
        assert all(not table.arrays for (table,) in store.tables[:i])
    # The lists of the stage's objects, then the objects: of no other stage.
    assert [name for (name,) in store.asked] == ["0/1", "0/1/0", "1/1", "1/1/0", "2/1", "2/1/0"]
    assert all(not table.arrays for (table,) in store.tables)
    assert routing.fetched_bytes == 3 * 5 * 2  # rows × top-k


def test_without_replayed_layers_nothing_is_fetched():
    store = Store()
    assert list(store.fetch(layers=()).one_ahead(store.mini_batches)) == store.mini_batches
    assert store.asked == []


def test_an_error_of_the_fetch_is_raised_where_the_routing_is_needed():
    store = Store()
    del store.references["1/1/0"]
    reached = []
    with pytest.raises(KeyError, match="1/1/0"):
        for batches in store.fetch().one_ahead(store.mini_batches):
            reached.append(batches)
    assert len(reached) == 1


def test_mini_batches_without_stored_routing_pass_through():
    [batches], _ = lay_out(samples_of(turns(([1, 2], [5, 6]))), 1, 100)
    routing = RoutingFetch([batches], [], 0, [0], get=None)
    assert list(routing.one_ahead([batches])) == [batches]
