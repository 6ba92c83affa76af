#!/usr/bin/env python3
"""Trains as pytorch_digits.py does, and goes on when ranks die, leave or are added (docs/elastic.md).

    hvdrun -np 4 --min-np 2 python3 examples/elastic_digits.py

Kill a rank to see it. Rank 0 also writes a checkpoint after each epoch, because all ranks may die. The program begins
with the checkpoint if there is one.
"""

import argparse
import os

import torch
from pytorch_digits import hvd, load_images, weights_sha256
from torch import nn
from torch.nn import functional


@hvd.elastic.run
def train(state, images, epochs, batch, checkpoint):
    pixels, digits = images
    while state.epoch < epochs:
        share = max(1, batch // hvd.size())  # there may be more ranks than images in a batch
        loader = torch.utils.data.DataLoader(range(len(pixels)), share, sampler=state.sampler)
        loss = torch.zeros(())  # there may be no sample left if the ranks have changed
        for number, mine in enumerate(loader):
            state.optimizer.zero_grad()
            loss = functional.cross_entropy(state.model(pixels[mine]), digits[mine])
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(number, len(mine))
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}/{epochs}: ranks={hvd.size()} loss={loss.item():.4f}", flush=True)
            if checkpoint:
                values = {"epoch": state.epoch, "model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
                torch.save(values, checkpoint + ".new")
                os.replace(checkpoint + ".new", checkpoint)
        state.commit()


def main():
    parser = argparse.ArgumentParser(description="Train a network on handwritten digits with ranks that die and come.")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch", type=int, default=64, help="number of images in a step, over all ranks")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=1, help="seed of the split, the weights and the order of the images")
    parser.add_argument("--checkpoint", default="", help="file of the checkpoint, which all hosts can read")
    o = parser.parse_args()
    if o.epochs < 0 or o.batch < 1:
        parser.error("want --epochs of at least 0, and --batch of at least 1")

    hvd.init()
    torch.set_num_threads(1)
    pixels, digits, test_pixels, test_digits = load_images(o.seed)
    torch.manual_seed(o.seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=o.rate, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(pixels, seed=o.seed)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    if os.path.exists(o.checkpoint):
        values = torch.load(o.checkpoint)
        model.load_state_dict(values["model"])
        optimizer.load_state_dict(values["optimizer"])
        state.epoch = values["epoch"]
        sampler.set_epoch(state.epoch)
    train(state, (pixels, digits), o.epochs, o.batch, o.checkpoint)

    with torch.no_grad():
        accuracy = (model(test_pixels).argmax(1) == test_digits).double().mean().item()
    print(f"digits: ranks={hvd.size()} test_accuracy={accuracy:.4f} weights_sha256={weights_sha256(model)}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
