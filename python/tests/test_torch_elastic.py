"""Tests gohvd.elastic and gohvd.torch.elastic."""

from __future__ import annotations

import pickle
import unittest
from unittest import mock

import torch

import gohvd.torch as hvd
from gohvd import elastic
from gohvd.exceptions import InitError, PeerError
from gohvd.torch.elastic import state as states
from ranks import RanksTest


class Elastic(RanksTest):
    """Tests programs for elastic jobs in a job of fixed size. elastic_ranks.py has programs whose ranks change."""

    def state(self):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (self.rank + 1), momentum=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        with torch.no_grad():
            model.weight.fill_(self.rank + 1.0)
        return hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=self.rank, batch=0, seen=[self.rank])

    def test_a_script(self) -> None:
        state = self.state()
        resets: list = []
        state.register_reset_callbacks([lambda: resets.append(1)])

        @hvd.elastic.run
        def train(state, steps, scale=1.0):
            self.assertEqual((state.epoch, state.seen), (0, [0]))
            self.equal(state.model.weight.detach(), torch.ones(2, 3))
            self.assertEqual(state.optimizer.param_groups[0]["lr"], 0.1)
            for state.batch in range(steps):
                state.optimizer.zero_grad()
                (state.model(torch.full((4, 3), float(self.rank))) * scale).sum().backward()
                state.optimizer.step()
                state.seen.append(state.batch)
                state.commit()
            return state.batch

        self.assertEqual(train(state, 3, scale=2.0), 2)
        self.assertEqual(train.__name__, "train")
        for other in hvd.allgather(state.model.weight.detach().unsqueeze(0)):
            self.equal(state.model.weight.detach(), other)
        # restore undoes the changes since the last commit.
        want = state.model.weight.detach().clone()
        with torch.no_grad():
            state.model.weight.zero_()
        state.batch, state.optimizer.param_groups[0]["lr"] = 7, 5.0
        state.seen.append("lost")
        state.restore()
        self.equal(state.model.weight.detach(), want)
        self.assertEqual((state.batch, state.seen, state.optimizer.param_groups[0]["lr"]), (2, [0, 0, 1, 2], 0.1))
        self.assertEqual(resets, [])

    def test_steps(self) -> None:
        """With a vote for each step, nothing is saved. Optimizers that step without gradients are refused."""
        state = self.state()
        saved = state._handlers["model"]._saved

        @hvd.elastic.run(step=True)
        def train(state, closure=None):
            for state.batch in range(3):
                state.model(torch.ones(4, 3)).sum().backward()
                state.optimizer.step(closure)
                state.optimizer.zero_grad()
                state.commit()

        train(state)
        self.assertEqual(state.batch, 2)
        self.assertIs(state._handlers["model"]._saved, saved)
        with self.assertRaisesRegex(ValueError, "without a closure"):
            train(state, lambda: torch.zeros(()))
        model = torch.nn.Linear(3, 2)
        adasum = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
        with self.assertRaisesRegex(ValueError, "Adasum"):
            train(hvd.elastic.TorchState(model=model, optimizer=adasum, batch=0))

    def test_sync_in_pairs(self) -> None:
        """The last rank gets the tensors from the one before it, and no other rank gets or sends any."""
        if self.size == 1:
            return
        state, last = self.state(), self.size - 1
        state.model(torch.ones(4, 3)).sum().backward()
        state.optimizer.step()
        weight = state.model.weight.detach()
        state.optimizer.state[state.model.weight]["momentum_buffer"].fill_(self.rank + 1.0)
        sender = last - 1 if self.rank == last else self.rank
        want = hvd.allgather(weight.unsqueeze(0))[sender]
        state._begin(0, False, {last - 1: (-1, last), last: (last - 1, -1)}.get(self.rank, (-1, -1)))
        state.sync()
        self.equal(weight, want)
        self.equal(state.optimizer.state[state.model.weight]["momentum_buffer"], torch.full((2, 3), sender + 1.0))
        self.assertEqual((state.epoch, state.seen), (0, [0]))

    def test_sync_of_another_model(self) -> None:
        """A rank whose model has other tensors than that of the root fails before it gets any."""
        last = self.size - 1
        for other in (torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.nn.Linear(3, 2).double()):
            state = hvd.elastic.TorchState(model=other if self.rank == last else torch.nn.Linear(3, 2))
            with mock.patch.object(states, "send_parameters") as send:
                if 0 < self.rank == last:
                    with self.assertRaisesRegex(ValueError, "other tensors than that of rank 0"):
                        state._handlers["model"].sync()
                else:
                    state._handlers["model"].sync()
            self.assertEqual(send.called, self.rank < last or last == 0)

    def test_sync_after_pairs(self) -> None:
        """A sync that the program calls itself sends the state of the first rank to all."""
        state, progress = self.state(), elastic._progress()
        progress.pairs, progress.missing, progress.source, progress.receiver = 1, 1, -1, -1

        @hvd.elastic.run
        def train(state):
            state.sync()

        with mock.patch.object(elastic, "_progress", return_value=progress):
            train(state)
        self.equal(state.model.weight.detach(), torch.ones(2, 3))

    def test_failures_are_not_caught(self) -> None:
        @hvd.elastic.run
        def train(state):
            raise hvd.HorovodInternalError("on purpose")

        with self.assertRaisesRegex(hvd.HorovodInternalError, "on purpose"):
            train(hvd.elastic.TorchState(epoch=0))

    def test_sampler(self) -> None:
        data = range(20 * self.size + 1)
        sampler = hvd.elastic.ElasticSampler(data, seed=3)
        mine = list(sampler)
        self.assertEqual(len(sampler), 21 if self.size > 1 else len(data))
        self.assertEqual(len(mine), len(sampler))
        self.assertEqual(sorted({i for part in hvd.allgather_object(mine) for i in part}), list(data))
        for batch in range(2):
            sampler.record_batch(batch, 5)
        done = {i for part in hvd.allgather_object(mine[:10]) for i in part}
        state = hvd.elastic.TorchState(sampler=sampler)
        if self.rank > 0:
            sampler.set_epoch(5)
        state.sync()  # all ranks get the state of rank 0
        self.assertEqual(sampler.state_dict(), {"epoch": 0, "processed_num": 10 * self.size})
        left = {i for part in hvd.allgather_object(list(sampler)) for i in part}
        self.assertEqual(done | left, set(data))
        self.assertEqual(done & left, set())
        sampler.set_epoch(1)
        self.assertEqual(len(sampler), len(mine))
        self.assertNotEqual(list(sampler), mine)
        self.assertEqual(list(hvd.elastic.ElasticSampler([], shuffle=False)), [])

    def test_schedulers(self) -> None:
        """A scheduler remains that of the rank's own optimizer. Only its state is saved and sent."""
        state = self.state()
        mine = torch.optim.lr_scheduler.StepLR(state.optimizer, 1, 0.5)
        state = hvd.elastic.TorchState(model=state.model, optimizer=state.optimizer, scheduler=mine)
        for _ in range(self.rank):
            mine.step()

        @hvd.elastic.run
        def train(state):
            for _ in range(3):
                state.model(torch.ones(4, 3)).sum().backward()
                state.optimizer.step()
                state.optimizer.zero_grad()
                state.scheduler.step()
                state.commit()

        train(state)
        for _ in range(2):  # a step after a restore does not change what the next one restores
            self.assertIs(state.scheduler, mine)
            rates = hvd.allgather_object((state.optimizer.param_groups[0]["lr"], mine.last_epoch, mine.get_last_lr()))
            self.assertEqual(rates, [(0.0125, 3, [0.0125])] * self.size)
            mine.step()
            state.restore()
        self.rank or mine.step()
        state._sync_values()
        self.assertEqual(set(hvd.allgather_object((state.optimizer.param_groups[0]["lr"], mine.last_epoch))), {(0.00625, 4)})

    def test_schedulers_that_change(self) -> None:
        """A value may change between None and a scheduler. A rank that lacks the scheduler of the others gets an error."""
        state = self.state()
        state = hvd.elastic.TorchState(optimizer=state.optimizer, scheduler=None)
        state.scheduler = mine = torch.optim.lr_scheduler.StepLR(state.optimizer, 1, 0.5)
        for _ in range(self.rank + 1):
            mine.step()
        state.sync()
        state.save()
        state.scheduler = None
        state.restore()
        self.assertIs(state.scheduler, mine)
        self.assertEqual(mine.last_epoch, 1)
        if self.rank == 0:
            state.scheduler = None
        state.sync()
        self.assertIsNone(state.scheduler)
        if self.rank == 0:
            state.scheduler = mine
            state.sync()
        else:
            with self.assertRaisesRegex(ValueError, "scheduler is None at this rank"):
                state.sync()

    def test_changes_and_commits(self) -> None:
        """After a restore, a state has the values of the last commit, also of models and optimizers that were assigned."""
        first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        with torch.no_grad():
            for model, value in ((first, 1.0), (second, 2.0)):
                for p in model.parameters():
                    p.fill_(value)
        optimizer = torch.optim.Adam(first.parameters(), lr=0.5)
        state = hvd.elastic.TorchState(model=first, optimizer=optimizer, batch=20, more=None)
        state.sync()
        first.load_state_dict(second.state_dict())
        state.batch = 21
        state.restore()
        self.assertEqual((state.batch, state.more, first.weight[0, 0].item()), (20, None, 1.0))
        first(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        moment = optimizer.state[first.weight]["exp_avg"].clone()
        first.load_state_dict(second.state_dict())
        state.batch, optimizer.param_groups[0]["lr"] = 22, 0.25
        state.commit()
        state.batch, optimizer.param_groups[0]["lr"] = 23, 0.75
        for _ in range(2):  # a step after a restore does not change what the next one restores
            first(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.restore()
            self.assertEqual((state.batch, optimizer.param_groups[0]["lr"], first.weight[0, 0].item()), (22, 0.25, 2.0))
            self.equal(optimizer.state[first.weight]["exp_avg"], moment)
        state.model = second
        with torch.no_grad():
            second.weight.fill_(7.0)
        state.restore()
        self.assertIs(state.model, second)
        self.assertEqual(second.weight[0, 0].item(), 2.0)
        empty = hvd.elastic.TorchState(epoch=1)
        self.assertEqual((empty.model, empty.optimizer, empty.epoch), (None, None, 1))

    def test_a_commit_that_is_not_granted(self) -> None:
        """A state keeps the commit before the last one, until all ranks have saved the last one."""
        model = torch.nn.Linear(1, 1)
        state = hvd.elastic.TorchState(model=model, epoch=0)
        with torch.no_grad():
            model.weight.fill_(1.0)
        state.epoch = 1
        state.commit()
        with torch.no_grad():
            model.weight.fill_(2.0)
        state.epoch = 2
        with mock.patch("gohvd.elastic._vote", side_effect=PeerError("rank 1 failed", [1])):
            with self.assertRaises(PeerError):
                state.commit()
            state.epoch = 3
            with self.assertRaises(PeerError):
                state.commit()  # as in an exception handler; other ranks may have the commit of epoch 2
        self.assertFalse(state._loose())
        state.restore()
        self.assertEqual((state.epoch, model.weight.item()), (2, 2.0))
        state._put_back(state._before)
        state.restore()
        self.assertEqual((state.epoch, model.weight.item()), (1, 1.0))

    def test_loose(self) -> None:
        """Only a state of the package that has not been saved since its last commit can do without a sync."""
        state = hvd.elastic.TorchState(model=torch.nn.Linear(1, 1), epoch=0)
        state.commit()
        self.assertFalse(state._loose())
        state.model = state.model
        self.assertTrue(state._loose())
        state.commit()
        state.save()
        self.assertTrue(state._loose())

        class Own(hvd.elastic.TorchState):
            def save(self) -> None:
                super().save()

        own = Own(epoch=0)
        own.commit()
        self.assertTrue(own._loose())

    def test_handlers(self) -> None:
        class Handler(states.StateHandler):
            def save(self) -> None:
                self.saved = list(self.value)

            def restore(self) -> None:
                self.value[:] = self.saved

            def sync(self) -> None:
                self.value[:] = hvd.broadcast_object(self.value)

        registry = states.get_handler_registry()
        states.set_handler_registry([*registry, (list, Handler)])
        try:
            state = hvd.elastic.TorchState(model=torch.nn.Linear(1, 1), values=[self.rank])
        finally:
            states.set_handler_registry(registry)
        values = state.values
        state.sync()
        self.assertEqual(values, [0])
        state.commit()
        self.assertTrue(state._loose())
        values.append(1)
        state.restore()
        self.assertIs(state.values, values)
        self.assertEqual(values, [0])

    def test_interrupts(self) -> None:
        """A state that is told of changes interrupts the training at all ranks, at the next commit or check."""
        state = hvd.elastic.TorchState(steps=0)
        resets: list[int] = []
        state.register_reset_callbacks([lambda: resets.append(state._saved_state["steps"])])

        @hvd.elastic.run
        def train(state):
            while state.steps < 6:
                state.steps += 1
                if self.rank == self.size - 1 and state.steps in (2, 4):
                    self.assertTrue(state._host_messages.empty())
                    state.on_hosts_updated(10 + state.steps, 1)
                    self.assertFalse(state._host_messages.empty())
                if state.steps == 5 and self.rank == 0:
                    state.on_hosts_updated(-1, 2)  # it is older than the last one
                if state.steps % 2:
                    state.commit()
                else:
                    state.check_host_updates()
            return state.steps

        self.assertEqual(train(state), 6)
        self.assertEqual(resets, [2, 4])
        self.assertEqual(hvd.size(), self.size)
        state.on_hosts_updated(100, 1)
        with self.assertRaises(hvd.elastic.HostsUpdatedInterrupt) as caught:
            state.check_host_updates()
        self.assertIs(caught.exception.skip_sync, True)
        state.on_hosts_updated(101, 3)
        with self.assertRaises(RuntimeError) as caught:
            state.commit()
        self.assertIs(caught.exception.skip_sync, False)
        with self.assertRaises(TypeError):
            hvd.elastic.HostsUpdatedInterrupt()
        self.assertIs(pickle.loads(pickle.dumps(caught.exception)).skip_sync, False)

    def test_a_change_after_an_interrupt(self) -> None:
        """What a program changes after an interrupt is in the state to which the ranks go back, as new ranks get it too."""
        state = hvd.elastic.TorchState(interrupts=0)

        @hvd.elastic.run
        def train(state):
            if state.interrupts == 0:
                state.on_hosts_updated(1, 1)
                try:
                    state.commit()
                except hvd.elastic.HostsUpdatedInterrupt:
                    state.interrupts += 1
                    raise
            state.restore()  # as after the death of a rank
            return state.interrupts

        self.assertEqual(train(state), 1)

    def test_own_errors(self) -> None:
        """Errors that are not the failure of ranks leave the wrapper, and the job goes on."""
        for error in (KeyError("mine"), SystemExit(3)):

            @hvd.elastic.run
            def train(state):
                raise error

            with self.assertRaises(type(error)) as caught:
                train(hvd.elastic.TorchState(epoch=0))
            self.assertIs(caught.exception, error)

        @hvd.elastic.run
        def contradict(state):
            hvd.allreduce(torch.ones(1 + self.rank), name="contradict")
            raise hvd.HorovodInternalError("alone")

        with self.assertRaises(hvd.HorovodInternalError):
            contradict(hvd.elastic.TorchState(epoch=0))
        self.assertEqual(hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), self.size)

    def test_sampler_of_other_ranks(self) -> None:
        """The samples that the ranks have not processed are distributed among other ranks, each once."""
        data = list(range(203))

        def at(rank, size):
            return mock.patch.multiple(
                "gohvd.torch.elastic.sampler", rank=mock.Mock(return_value=rank), size=mock.Mock(return_value=size)
            )

        done: list[int] = []
        saved: dict[str, int] = {"epoch": 2, "processed_num": 0}
        for size in (4, 3, 5, 2):
            parts = []
            for rank in range(size):
                with at(rank, size):
                    sampler = hvd.elastic.ElasticSampler(data, seed=5)
                    sampler.load_state_dict(saved)
                    self.assertEqual((sampler.rank, sampler.num_replicas, sampler.epoch), (rank, size, 2))
                    self.assertEqual(sampler.total_size, sampler.num_samples * size)
                    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
                    it = iter(loader)
                    batches = [next(it) for _ in range(3)] if size != 2 else list(loader)
                    for number, batch in enumerate(batches):
                        sampler.record_batch(number, len(batch))
                    parts.append([i for batch in batches for i in batch.tolist()])
            saved = sampler.state_dict()
            done += sum(parts, [])
        self.assertEqual(sorted(set(done)), data)
        self.assertLess(len(done) - len(data), 2)
        self.assertEqual(saved["processed_num"], len(done))

    def test_reset_of_samplers(self) -> None:
        """A sampler of a state learns the new ranks, also if there is no sync."""
        sampler = hvd.elastic.ElasticSampler(range(100))
        state = hvd.elastic.TorchState(sampler=sampler)
        with mock.patch("gohvd.torch.elastic.sampler.size", return_value=7):
            state.on_reset()
        self.assertEqual(sampler.num_replicas, 7)

    def test_notifications(self) -> None:
        """The manager tells its listeners once in a generation that the launcher has changed the ranks."""
        got: list = []
        listener = mock.Mock()
        listener.on_hosts_updated = lambda timestamp, kind: got.append(kind)
        progress = mock.Mock(pending=2, generation=5)
        elastic.notification_manager.init()
        elastic.notification_manager.register_listener(listener)
        try:
            with mock.patch("gohvd.elastic._progress", return_value=progress):
                elastic.notification_manager.poll()
                elastic.notification_manager.poll()
                progress.generation = 6
                elastic.notification_manager.poll()
        finally:
            elastic.notification_manager.remove_listener(listener)
        self.assertEqual(got, [2, 2])

    def wrapped(self, train, reset, end=None, join=lambda _: None):
        """Calls run_fn(train, reset) with a state that records the calls of its methods. The library says that the rank has
        the commit, and that another rank has not. end is the error of hvd_elastic_end, and join is called in
        hvd_elastic_join. Returns the calls and the error.
        """
        calls: list[str] = []
        progress = mock.Mock(generation=2, pending=0, changes=0, held=1, restore=0, missing=1, root=0, pairs=0, removed=0)
        state = hvd.elastic.TorchState(epoch=0)
        for name in ("save", "restore", "sync", "on_reset"):
            setattr(state, name, lambda name=name: calls.append(name))

        def call(function, *args) -> None:
            if end is not None and function.__name__ == "hvd_elastic_end":
                raise end
            if function.__name__ == "hvd_elastic_join":
                join(progress)

        def trained(state):
            calls.append("train")
            return train(len([name for name in calls if name == "train"]))

        def do_reset() -> None:
            calls.append("reset")
            progress.restore = 1
            reset(progress)

        with mock.patch("gohvd.elastic._progress", return_value=progress), mock.patch("gohvd._library.call", call):
            try:
                elastic.run_fn(trained, do_reset)(state)
            except BaseException as e:
                return calls, e
        return calls, None

    def test_order_after_a_failure(self) -> None:
        """The state is set back to the commit, then callbacks change it, and then other ranks get it."""

        def train(times: int) -> None:
            if times == 1:
                raise PeerError("rank 1 failed", [1])

        calls, error = self.wrapped(train, lambda _: None)
        self.assertIsNone(error)
        self.assertEqual(calls, "sync save train reset restore on_reset sync save train".split())

    def test_ends_of_the_wrapper(self) -> None:
        def fail(_: int) -> None:
            raise PeerError("rank 1 failed", [1])

        final = hvd.HorovodInternalError("three times in a row")
        calls, error = self.wrapped(fail, lambda _: None, final)
        self.assertIs(error, final)
        self.assertIsInstance(error.__cause__, PeerError)
        self.assertNotIn("reset", calls)

        def removed(progress) -> None:
            progress.removed = 1
            raise InitError("the launcher has removed this process")

        def unlucky(progress) -> None:
            raise InitError("no launcher")

        calls, error = self.wrapped(fail, removed)
        self.assertIsInstance(error, SystemExit)
        self.assertEqual(error.code, 0)
        calls, error = self.wrapped(fail, unlucky, join=removed)
        self.assertIsInstance(error, SystemExit)
        self.assertEqual((calls, error.code), ([], 0))
        calls, error = self.wrapped(fail, unlucky)
        self.assertIsInstance(error, InitError)
        self.assertEqual(elastic.notification_manager._listeners, [])


if __name__ == "__main__":
    unittest.main()
