"""Tests errors after which the job goes on, process sets, and ranks that have joined."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import unittest
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
from ranks import RanksTest, hvd

from gohvd import _library
from gohvd.exceptions import HorovodVersionMismatchError, NotInitializedError, PeerError
from gohvd.process_sets import get_process_set_ids_and_ranks


class SetsTest(RanksTest):
    def together(self) -> None:
        """Waits for all ranks. It is called before a shutdown, which would end the operations that other ranks still
        run.
        """
        hvd.allreduce(torch.ones(1), name="together")

    def restart_count(self) -> None:
        """Restarts the job, so that all ranks count unnamed operations from 0 again. Otherwise the counts differ after
        calls that only some ranks have made.
        """
        self.together()
        hvd.shutdown()
        hvd.init()


class Errors(SetsTest):
    def tearDown(self) -> None:
        # After each error the job must go on.
        self.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(self.size)))

    def mismatch(self, call, *parts: str) -> None:
        if self.size == 1:
            return
        with self.assertRaises(hvd.HorovodInternalError) as caught:
            call()
        for part in parts:
            self.assertIn(part, str(caught.exception))

    def test_mismatch(self) -> None:
        text = '"allreduce.shapes": mismatched shapes'
        self.mismatch(lambda: hvd.allreduce(torch.ones(self.rank + 1), name="shapes"), text)
        self.mismatch(lambda: hvd.broadcast(torch.ones(2), self.rank), "mismatched root ranks")

    def test_names_in_use(self) -> None:
        # The last rank submits late. So the first tensor is in flight when the second tensor with the same name is
        # submitted.
        late = self.rank == self.size - 1 and self.size > 1
        if late:
            hvd.barrier()
        first = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        if not late and self.size > 1:
            with self.assertRaises((ValueError, hvd.HorovodInternalError)) as caught:
                hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
            self.assertIn("twice", str(caught.exception))
            with self.assertRaises((ValueError, hvd.HorovodInternalError)):
                hvd.allreduce(torch.ones(1), name="twice")
            hvd.barrier()
        self.equal(hvd.synchronize(first), torch.full((2,), float(self.size)))
        self.restart_count()

    def test_a_group_of_types_fails_whole(self) -> None:
        rows = 3 if self.rank == self.size - 1 else 2
        tensors = [torch.full((3,), float(self.rank)), torch.ones(rows, dtype=torch.float64)]
        texts = '"grouped_allreduce.fails"', "mismatched shapes of tensor 2 of 2"
        self.mismatch(lambda: hvd.grouped_allreduce_(tensors, name="fails"), *texts)
        handle = hvd.grouped_allreduce_async_(tensors, name="fails")
        while not hvd.poll(handle):
            os.sched_yield()
        if self.size == 1:
            hvd.synchronize(handle)
            return
        self.mismatch(lambda: hvd.synchronize(handle), *texts)
        self.equal(tensors[0], torch.full((3,), float(self.rank)))

    def test_a_group_is_refused_whole(self) -> None:
        one, two = torch.ones(3), torch.ones(2, dtype=torch.float64)
        for bad in (torch.ones(4, 4).t()[:3], torch.ones(3, dtype=torch.complex64), torch.eye(2).to_sparse()):
            for begin in (hvd.grouped_allreduce_async, hvd.grouped_allgather_async):
                with mock.patch.object(_library.quick, "hvd_submit") as submit, self.assertRaises(ValueError):
                    begin([one, two, bad], name="whole")
                submit.assert_not_called()
        if self.rank > 0:
            hvd.barrier()  # the other ranks submit nothing before it, so rank 0's operations cannot complete
        of_this_name = [
            hvd.grouped_allreduce_async([two], name="whole"),
            hvd.grouped_allreduce_async([two], name="whole_2of2"),  # not the name of a tensor of the group
            hvd.grouped_allgather_async([two, two], name="whole"),
        ]
        if self.rank == 0 and self.size > 1:
            for begin, full in (
                (hvd.grouped_allreduce_async, "grouped_allreduce.whole"),
                (hvd.grouped_allreduce_async_, "grouped_allreduce.whole"),
                (hvd.grouped_allgather_async, "grouped_allgather.whole_1of2"),
            ):
                with self.assertRaisesRegex(ValueError, f'{full}"?: .* same name'):
                    begin([one, two], name="whole")
            hvd.barrier()
        for handle in of_this_name:
            hvd.synchronize(handle)
        if self.rank > 0:
            hvd.barrier()
        under_way = hvd.grouped_allreduce_async([one, two], name="whole", op=hvd.Sum)
        if self.rank == 0:
            for tensors in ([one, two], [two, one], [two]) if self.size > 1 else ():
                with self.assertRaisesRegex(ValueError, '"grouped_allreduce.whole": .* same name'):
                    hvd.grouped_allreduce_async(tensors, name="whole")
            hvd.barrier()
        self.assertEqual([float(x.sum()) for x in hvd.synchronize(under_way)], [3.0 * self.size, 2.0 * self.size])

    def test_names_of_operations_are_apart(self) -> None:
        # An allreduce, an allgather and a broadcast with the same name are different operations, so they can be in
        # flight at the same time.
        a = hvd.allreduce_async(torch.ones(2), name="apart", op=hvd.Sum)
        b = hvd.allgather_async(torch.ones(1), name="apart")
        c = hvd.broadcast_async(torch.ones(1), 0, name="apart")
        self.equal(hvd.synchronize(c), torch.ones(1))
        self.equal(hvd.synchronize(b), torch.ones(self.size))
        self.equal(hvd.synchronize(a), torch.full((2,), float(self.size)))


class ProcessSets(SetsTest):
    def test_pickled_errors(self) -> None:
        changed = NotInitializedError()
        changed.args = ("another text",)
        changed.rank = 3  # type: ignore[attr-defined]
        for error in (NotInitializedError(), changed, HorovodVersionMismatchError("torch", "1", "2"), PeerError("failed", [1])):
            again = pickle.loads(pickle.dumps(error))
            self.assertEqual((type(again), str(again), vars(again)), (type(error), str(error), vars(error)))

    def test_members_alone(self) -> None:
        for ranks in ([0], list(range(self.size))[::2], [self.size - 1]):
            if len(ranks) == self.size:
                continue
            ps = hvd.add_process_set(ranks)
            self.assertEqual(ps.ranks, ranks)
            self.assertEqual(ps.size(), len(ranks))
            self.assertEqual(ps.included(), self.rank in ranks)
            if self.rank in ranks:
                self.members(ps, ranks)
            else:
                for call in (
                    lambda: hvd.allreduce(torch.ones(2), process_set=ps),
                    lambda: hvd.allgather(torch.ones(2), process_set=ps),
                    lambda: hvd.broadcast(torch.ones(2), ranks[0], process_set=ps),
                    lambda: hvd.barrier(process_set=ps),
                ):
                    with self.assertRaises((ValueError, hvd.HorovodInternalError)):
                        call()
            self.equal(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="all"), torch.tensor([float(self.size)]))
            self.assertTrue(hvd.remove_process_set(ps))
            self.assertIsNone(ps.process_set_id)
            self.restart_count()

    def members(self, ps, ranks) -> None:
        place = ranks.index(self.rank)
        self.assertEqual(ps.rank(), place)
        x = torch.tensor([float(self.rank), 1.0])
        total = torch.tensor([float(sum(ranks)), float(len(ranks))])
        self.equal(hvd.allreduce(x, op=hvd.Sum, process_set=ps), total)
        self.close(hvd.allreduce(x, process_set=ps), total / len(ranks), 1e-6)
        self.equal(hvd.grouped_allreduce([x], op=hvd.Sum, process_set=ps)[0], total)
        self.equal(hvd.allgather(torch.tensor([self.rank]), process_set=ps), torch.tensor(ranks))
        for root in ranks:
            self.equal(hvd.broadcast(torch.tensor([self.rank]), root, process_set=ps), torch.tensor([root]))
        rows = torch.arange(len(ranks)) + 10 * self.rank
        self.equal(hvd.alltoall(rows, process_set=ps), torch.tensor([10 * r + place for r in ranks]))
        part = torch.tensor_split(torch.arange(5.0) * len(ranks), len(ranks))[place]
        self.equal(hvd.reducescatter(torch.arange(5.0), op=hvd.Sum, process_set=ps), part)
        self.assertIsNone(hvd.barrier(process_set=ps))
        if self.size > 1:
            outside = next(r for r in range(self.size) if r not in ranks)
            with self.assertRaises((ValueError, hvd.HorovodInternalError)):
                hvd.broadcast(torch.ones(2), outside, process_set=ps)
        self.assertEqual(hvd.broadcast_object([self.rank], ranks[-1], "o", ps), [ranks[-1]])

    def test_gradients_of_members(self) -> None:
        if self.size < 2:
            self.skipTest("needs another rank")
        ps = hvd.add_process_set(list(range(1, self.size)))
        if ps.included():
            n = ps.size()
            x = torch.ones(2, requires_grad=True)
            hvd.allreduce(x, op=hvd.Sum, process_set=ps).backward(torch.full((2,), float(self.rank)))
            self.equal(x.grad, torch.full((2,), float(sum(ps.ranks))))
            x = torch.ones(2, requires_grad=True)
            hvd.reducescatter(x, op=hvd.Sum, process_set=ps).sum().backward()
            self.equal(x.grad, torch.full((2,), float(n)))
            x = torch.ones(2, requires_grad=True)
            hvd.allgather(x, process_set=ps).sum().backward()
            self.equal(x.grad, torch.ones(2))
            x = torch.ones(2, requires_grad=True)
            hvd.broadcast(x, 1, process_set=ps).sum().backward()
            self.equal(x.grad, torch.full((2,), 1.0 if self.rank == 1 else 0.0))
            x = torch.ones(n, requires_grad=True)
            hvd.alltoall(x, process_set=ps).sum().backward()
            self.equal(x.grad, torch.ones(n))
        hvd.remove_process_set(ps)
        self.restart_count()

    def test_all_ranks_of_the_job(self) -> None:
        ps = hvd.global_process_set
        self.assertEqual(ps.process_set_id, 0)
        self.assertEqual(list(ps.ranks), list(range(self.size)))
        self.assertEqual((ps.rank(), ps.size(), ps.included()), (self.rank, self.size, True))
        self.assertFalse(hvd.remove_process_set(ps))
        with self.assertRaises((ValueError, hvd.HorovodInternalError)):
            hvd.add_process_set(list(range(self.size)))

    def test_sets_of_init(self) -> None:
        hvd.shutdown()
        sets = [hvd.ProcessSet([r]) for r in range(self.size)] if self.size > 1 else []
        hvd.init(process_sets=sets)
        for r, ps in enumerate(sets):
            self.assertEqual((ps.process_set_id, ps.ranks, ps.included()), (r + 1, [r], r == self.rank))
        if sets:
            x = torch.ones(2)
            self.equal(hvd.allreduce(x, op=hvd.Sum, process_set=sets[self.rank]), x)
        self.together()
        hvd.shutdown()
        hvd.init(process_sets="dynamic")

    def test_a_set_of_init_with_all_ranks(self) -> None:
        everyone = hvd.ProcessSet(range(self.size))
        with self.assertRaisesRegex(ValueError, "duplicate"):
            hvd.init(process_sets=[everyone])
        self.assertTrue(hvd.is_initialized(), "it was before")
        self.together()
        hvd.shutdown()
        with self.assertRaisesRegex(ValueError, "duplicate"):
            hvd.init(process_sets=[everyone])
        self.assertIsNone(everyone.process_set_id)
        # The error of a failed init is both a ValueError and a HorovodInternalError.
        with self.assertRaisesRegex(hvd.HorovodInternalError, "duplicate"):
            hvd.init(process_sets=[everyone])
        with self.assertRaisesRegex(ValueError, f"rank {self.size + 1}, want 0 to {self.size - 1}"):
            hvd.init(process_sets=[hvd.ProcessSet([0, self.size + 1])])
        self.assertFalse(hvd.is_initialized())
        hvd.init(process_sets="dynamic")
        self.together()

    def test_copies_and_pickles(self) -> None:
        everyone = hvd.global_process_set
        self.assertIs(pickle.loads(pickle.dumps(everyone)), everyone)
        new = copy.deepcopy(hvd.ProcessSet([self.size]))
        self.assertEqual((new.process_set_id, new.ranks), (None, [self.size]))
        comm = mock.Mock()  # stands for a communicator of mpi4py
        self.assertIs(copy.copy(hvd.ProcessSet(comm)).mpi_comm, comm)
        if self.size == 1:
            return
        ps = hvd.add_process_set([self.size - 1])
        saved = pickle.dumps(ps)
        self.assertIs(pickle.loads(saved), ps)
        self.assertIs(copy.deepcopy(ps), ps)
        hvd.remove_process_set(ps)
        gone = pickle.loads(saved)
        self.assertEqual((gone.process_set_id, gone.ranks), (None, [self.size - 1]))
        x = torch.nn.Parameter(torch.zeros(1))
        with self.assertRaisesRegex(ValueError, "is not registered"):
            hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)], process_set=gone)
        # A set with the same ranks has got another number.
        others = [hvd.add_process_set(ranks) for ranks in ([0], [self.size - 1])]
        self.assertIs(pickle.loads(saved), others[1])
        for other in others:
            hvd.remove_process_set(other)

    def test_all_sets(self) -> None:
        want = {0: list(range(self.size))}
        self.assertEqual(get_process_set_ids_and_ranks(), want)
        if self.size > 1:
            ps = hvd.add_process_set([self.size - 1])
            self.assertEqual(get_process_set_ids_and_ranks(), {**want, ps.process_set_id: [self.size - 1]})
            hvd.remove_process_set(ps)
            self.assertEqual(get_process_set_ids_and_ranks(), want)


class Join(SetsTest):
    def tearDown(self) -> None:
        self.restart_count()

    def test_uneven_steps(self) -> None:
        for turn in range(2):
            steps = self.rank + 1
            for step in range(steps):
                got = hvd.allreduce(torch.ones(3), name="step", op=hvd.Sum)
                active = sum(1 for r in range(self.size) if r + 1 > step)
                self.equal(got, torch.full((3,), float(active)))
            self.assertEqual(hvd.join(), self.size - 1, f"turn {turn}")

    def test_groups_of_several_types(self) -> None:
        if self.rank == 0:
            for op in (hvd.Sum, hvd.Min, hvd.Product):
                tensors = [torch.tensor([-3.0, 3.0]), torch.tensor([5, -7, 0]), torch.tensor([0.5], dtype=torch.float16)]
                for _ in range(2):
                    for got, x in zip(hvd.grouped_allreduce(tensors, name=f"types{op}", op=op), tensors):
                        self.equal(got, x)
        hvd.join()



if __name__ == "__main__":
    unittest.main()
