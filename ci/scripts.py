"""The scripts that `ci/integrations.py` runs: blocks of pages, and around them a small model, data and a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """A block of Python of a page."""

    page: str
    mark: str
    """Text that only this block of the page has."""


def _of_libraries(mark: str) -> Block:
    return Block("libraries.md", mark)


_BEGIN = """
import os
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
"""
_SPARSE = "from horovod_sparse.torch import SIDCo, register\n"
IMPORT_LOCAL = "from horovod_sparse.torch import LocalUpdates, SIDCo\n"
_HOROVOD = "import horovod.torch as hvd\nfrom horovod_sparse.torch import SIDCo\n"
_SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
"""
_INIT = "hvd.init()\n"
_DATA = """
torch.manual_seed(0)
x = torch.randn(512, 20)
data = TensorDataset(x, x[:, :3].argmax(1))
loader = DataLoader(data, batch_size=16, shuffle=True)
layers = torch.nn.Sequential(torch.nn.Linear(20, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 3))
"""
_MODEL = f"{_DATA}model = layers\n"
_COMPRESSION = "compression = SIDCo(ratio=0.01)\n"
_SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)\n"
_DISTRIBUTED = f"""
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
{_SGD}
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
"""
_PART = "loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, hvd.size(), hvd.rank()))\n"

_ACCELERATOR = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
"""
_ACCELERATED = """
for inputs, labels in loader:
    optimizer.zero_grad()
    accelerator.backward(F.cross_entropy(model(inputs), labels))
    optimizer.step()
"""
_ACCELERATED_LOCAL = """
for _ in range(3):
    for inputs, labels in loader:
        local.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        local.step()
local.synchronize()
"""

_TRAINER = f"""
from transformers import Trainer, TrainerCallback, TrainingArguments
{_DATA}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers

    def forward(self, x, labels):
        return {{"loss": F.cross_entropy(self.layers(x), labels)}}


data = [{{"x": one, "labels": int(one[:3].argmax())}} for one in x]
model = Net()
arguments = {{"use_cpu": True, "per_device_train_batch_size": 16, "save_strategy": "no", "report_to": []}}
"""
_TRAINER_DDP = """
arguments |= {"ddp_backend": "gloo", "optim": "sgd", "learning_rate": 0.05, "max_steps": 16}
options = {"args": TrainingArguments("output", **arguments), "train_dataset": data}
"""
_TRAINER_LOCAL = """
arguments |= {"ddp_backend": "gloo", "learning_rate": 1e-3, "num_train_epochs": 3}
options = {"args": TrainingArguments("output", **arguments), "train_dataset": data}
"""
_TRAINER_HOROVOD = 'options = {"args": TrainingArguments("output", max_steps=16, **arguments)}\n'
_TRAIN = "trainer.train()\n"

_LIGHTNING = f"""
import lightning as L
from lightning.pytorch.strategies import ModelParallelStrategy
{_DATA}

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = layers

    def training_step(self, batch, number):
        inputs, labels = batch
        return F.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


L.seed_everything(0)
options = {{"accelerator": "cpu", "logger": False, "enable_checkpointing": False}}
"""
_ENVIRONMENT = "from lightning.fabric.plugins.environments import LightningEnvironment\n"
_HOROVOD_NET = """
class Net(Net):
    def configure_optimizers(self):
        hvd.broadcast_parameters(self.state_dict(), root_rank=0)
        sgd = super().configure_optimizers()
        return hvd.DistributedOptimizer(sgd, named_parameters=self.named_parameters(), compression=compression)
"""


def _fit(net: str) -> str:
    return f"model = {net}()\ntrainer.fit(model, loader)\n"


_FABRIC = """
from lightning.fabric import Fabric
Fabric = partial(Fabric, accelerator="cpu")
"""
_COMPILED = """
for inputs, labels in loader:
    optimizer.zero_grad()
    F.cross_entropy(compiled(inputs), labels).backward()
    update()
"""


def _function(begin: str, connect: str, end: str) -> str:
    """A function that trains, with all that it needs: a launcher sends it to its workers."""
    return f"""
def train():
    import torch
    import torch.nn.functional as F
    from torch.nn import Linear, ReLU, Sequential
    {begin}
    model = Sequential(Linear(20, 2000), ReLU(), Linear(2000, 3))
    compression = SIDCo(ratio=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    {connect}
    for _ in range(10):
        x, y = torch.randn(16, 20), torch.randint(3, (16,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    checksum = sum(float(one.detach().double().sum()) for one in model.parameters())
    text = f"rank {{rank}}: {{compression.stats().steps}} steps, checksum {{checksum!r}}"
    {end}
"""


_ON_HOROVOD = _function(
    """
    import horovod.torch as hvd
    from horovod_sparse.torch import SIDCo
    hvd.init()
    rank = hvd.rank()
    """,
    """
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    """,
    "return text",
)
_ON_DDP = _function(
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from horovod_sparse.torch import SIDCo, register
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    """,
    """
    model = DistributedDataParallel(model)
    register(model, compression)
    """,
    "print(text, flush=True)",
)

_WITHOUT_MPI = _of_libraries("os.environ.pop")
SCRIPTS: dict[str, Sequence[str | Block]] = {
    "Accelerate, DDP": (
        *(_BEGIN, _SPARSE, _MODEL, _COMPRESSION, _ACCELERATOR, _SGD),
        _of_libraries("prepare(model, optimizer, loader)\nregister"),
        _ACCELERATED,
    ),
    "Transformers, DDP": (
        *(_BEGIN, _SPARSE, _TRAINER, _COMPRESSION, _TRAINER_DDP),
        _of_libraries("class Sparsify(TrainerCallback)"),
        _TRAIN,
    ),
    "Lightning, DDP": (
        *(_BEGIN, _SPARSE, _LIGHTNING, _COMPRESSION, 'options |= {"devices": 2, "max_epochs": 1}\n'),
        _of_libraries("(L.Callback)"),
        _fit("Net"),
    ),
    "Accelerate, FSDP2": (
        *(_BEGIN, _SPARSE, _SHARDED, _MODEL, _COMPRESSION, _ACCELERATOR),
        _of_libraries("accelerator.num_processes"),
        *(_SGD, "optimizer, loader = accelerator.prepare(optimizer, loader)\n", _ACCELERATED),
    ),
    "Lightning, FSDP2": (
        *(_BEGIN, _SPARSE, _SHARDED, _LIGHTNING, _COMPRESSION, 'options |= {"devices": 4, "max_epochs": 1}\n'),
        _of_libraries("class Sharded(Net)"),
        _fit("Sharded"),
    ),
    "Accelerate, local updates": (
        *(_BEGIN, IMPORT_LOCAL, _MODEL, _ACCELERATOR),
        _of_libraries("prepare_model(model, evaluation_mode=True)"),
        _ACCELERATED_LOCAL,
    ),
    "Transformers, local updates": (
        *(_BEGIN, IMPORT_LOCAL, _TRAINER, _TRAINER_LOCAL),
        _of_libraries("class Local(TrainerCallback)"),
        *(_TRAIN, "local = trainer.optimizer\n"),
    ),
    "Lightning, local updates": (
        *(_BEGIN, IMPORT_LOCAL, _LIGHTNING),
        'options |= {"devices": 2, "max_epochs": 3, "gradient_clip_val": 1.0}\n',
        _of_libraries("optimizer_step(self.local, closure)"),
        *(_fit("Local"), "local = model.local\n"),
    ),
    "Lightning, Horovod": (
        *(_BEGIN, _HOROVOD, _ENVIRONMENT, _INIT, _LIGHTNING, _COMPRESSION, _HOROVOD_NET, _PART),
        'options |= {"max_epochs": 1, "gradient_clip_val": 0.5}\n',
        _of_libraries("def on_before_optimizer_step"),
        _fit("Clipped"),
    ),
    "Fabric, Horovod": (
        *(_BEGIN, _HOROVOD, _ENVIRONMENT, _INIT, _MODEL, _COMPRESSION, _DISTRIBUTED, _PART, _FABRIC),
        _of_libraries("fabric.setup("),
    ),
    "Accelerate, Horovod": (
        *(_BEGIN, _HOROVOD),
        _WITHOUT_MPI,
        *(_MODEL, _COMPRESSION, _DISTRIBUTED, _PART, _ACCELERATOR),
        _of_libraries("model, sparse, loader"),
    ),
    "Transformers, Horovod": (
        *(_BEGIN, _HOROVOD),
        _WITHOUT_MPI,
        *(_TRAINER, _COMPRESSION, _DISTRIBUTED, _TRAINER_HOROVOD),
        _of_libraries("class Synchronized(Trainer)"),
        _TRAIN,
    ),
    "torch.compile, Horovod": (
        *(_BEGIN, _HOROVOD, _INIT, _MODEL, _COMPRESSION, _DISTRIBUTED, _PART),
        Block("pytorch.md", "torch.compile(model)"),
        _COMPILED,
    ),
    "Horovod on Ray": (_ON_HOROVOD, Block("launching.md", "RayExecutor(")),
    "Horovod on Spark": (_ON_HOROVOD, Block("launching.md", "horovod.spark.run(")),
    "Ray Train": (_ON_DDP, Block("launching.md", "TorchTrainer(")),
    "Spark's distributor": (_ON_DDP, Block("launching.md", "TorchDistributor(")),
}
