"""Fine-tune GPT-2 of Hugging Face Transformers on a text file in a plain loop, data parallel, with compressed exchanges.

    mpirun -np 2 python examples/torch_gpt2.py --data FILE --model gpt2 --local-steps 1
    mpirun -np 2 python examples/torch_gpt2.py --data FILE --model gpt2 --local-steps 5 --compression topk --exchange packed
    mpirun -np 2 python examples/torch_gpt2.py --synthetic --epochs 1

By default gradients are exchanged in every step. AdamW trains better with --local-steps 1, where the workers exchange how far
their parameters have moved. With more, every worker makes as many steps alone before they do. docs/libraries.md says more.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from functools import partial
from typing import Any

import torch
from common import ahead, check_replicas, local_ahead, make_compression, measure_traffic, optimizer_momentum
from jobs import Course, make_course, make_job_parser, print_closing_table, resume, save, start_log
from torch import Tensor, nn
from torch_states import read_states, write_states
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

import horovod_sparse.torch as hvd

HELD_OUT = 0.05
BYTES = 256


def load_model(args: argparse.Namespace) -> nn.Module:
    """A model that was trained before, or a new one of the options' size; tiny for --synthetic."""
    if args.model and not args.synthetic:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        longest = getattr(model.config, "max_position_embeddings", args.context)
        if args.context > longest:
            raise SystemExit(f"--context must be at most {longest} for {args.model}, got {args.context}")
        return model
    width, layers, heads = (64, 2, 2) if args.synthetic else (args.width, args.layers, args.heads)
    sizes = {"n_positions": args.context, "n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": BYTES}
    # Bytes need no tokens for beginning and end.
    return AutoModelForCausalLM.from_config(GPT2Config(bos_token_id=None, eos_token_id=None, **sizes))


def load_tokens(args: argparse.Namespace) -> Tensor:
    """The text in the tokens of --model, or in bytes."""
    if args.synthetic:
        # Enough for an exchange of local updates, besides what is held out.
        samples = max(40, 2 * hvd.size() * args.batch_size * args.local_steps)
        return torch.randint(BYTES, (samples * args.context,), generator=torch.Generator().manual_seed(0))
    if args.model:
        text = args.data.read_text(encoding="utf-8")
        return torch.tensor(AutoTokenizer.from_pretrained(args.model)(text, verbose=False)["input_ids"])
    return torch.tensor(list(args.data.read_bytes()))


def batch_indices(windows: int, args: argparse.Namespace, epoch: int) -> list[Tensor]:
    """This worker's batches of an epoch, as numbers of windows: seed and epoch decide on them."""
    generator = torch.Generator().manual_seed(hash((args.seed, epoch)))
    mine = torch.randperm(windows, generator=generator)[hvd.rank() :: hvd.size()][: windows // hvd.size()]
    return [part for part in mine.split(args.batch_size) if len(part) == args.batch_size]


def lr_factor(step: int, warmup: int, total: int) -> float:
    """Rises to 1 in the warm-up, then falls to 0. Steps count from 0."""
    return min((step + 1) / (warmup + 1), (total - step) / max(total - warmup, 1))


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """What is stepped, the compressor that counts bytes, and what a checkpoint holds."""
    # In your own script: compression = hvd.TopK(ratio=0.03).
    compression = make_compression(args, hvd)
    # The dense exchanges have no state.
    sparse = compression if hasattr(compression, "stats") else None
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    if not args.local_steps:
        sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=optimizer_momentum(compression, args))
        chosen = sgd if args.optimizer == "sgd" else adamw
        optimizer = hvd.DistributedOptimizer(chosen, named_parameters=model.named_parameters(), compression=compression)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        own = {} if sparse is None else {"compression": sparse}
        return optimizer, compression, {"model": model, "optimizer": optimizer, **own}
    if args.compression == "fp16":
        raise SystemExit("--local-steps needs --compression none or a sparsifier, got fp16; --local-steps 0 takes it")
    local = hvd.LocalUpdates(adamw, model, sparse, every=args.local_steps)
    return local, local.compression, {"model": model, "optimizer": adamw, "local": local}


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Perplexity of the held-out text. Every worker looks at its own part."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for part in windows[hvd.rank() :: hvd.size()].split(args.batch_size):
        with torch.autocast(device.type, torch.bfloat16, enabled=not args.float32):
            loss = model(input_ids=part.to(device), labels=part.to(device)).loss
        sums += torch.tensor([loss.item() * len(part), len(part)])
    model.train()
    total, count = hvd.allreduce(sums, op=hvd.Sum, name="held_out").tolist()
    return math.exp(min(total / count, 700.0))


def plan_steps(windows: int, args: argparse.Namespace) -> Course:
    """Epochs end with an exchange of local updates."""
    steps = windows // hvd.size() // args.batch_size
    if steps < args.local_steps:
        raise SystemExit(
            f"an epoch must have {args.local_steps} steps or more for an exchange, got {steps}; "
            "lower --local-steps, --batch-size or --context"
        )
    return make_course(args, steps - steps % max(args.local_steps, 1))


def main() -> None:
    parser = make_job_parser(
        __doc__.splitlines()[0], data="text file in UTF-8", epochs=3, batch_size=4, lr=5e-5, ratio=0.03
    )
    parser.add_argument("--model", help="name on the Hugging Face Hub, or folder; without it, a new model reads bytes")
    parser.add_argument("--local-steps", type=int, default=0, metavar="H", help="0: exchange gradients in every step")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help="with --local-steps 0")
    parser.add_argument("--context", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--width", type=int, default=768, help="of a new model")
    parser.add_argument("--layers", type=int, default=12, help="of a new model")
    parser.add_argument("--heads", type=int, default=12, help="of a new model")
    parser.add_argument("--warmup-steps", type=int, default=100, help="over which the learning rate rises")
    parser.add_argument("--float32", action="store_true", help="no autocast to bfloat16")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")

    tokens = load_tokens(args)
    windows = tokens[: len(tokens) // args.context * args.context].view(-1, args.context)
    boundary = len(windows) - max(int(HELD_OUT * len(windows)), hvd.size())
    train, held_out = windows[:boundary], windows[boundary:]
    course = plan_steps(len(train), args)
    model = load_model(args).to(device)
    model.train()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # Dropout is each worker's own.
    torch.manual_seed(args.seed + hvd.rank())
    optimizer, compression, kept = make_optimizer(model, args)
    step = resume(args, hvd, partial(read_states, kept))

    numel = sum(parameter.numel() for parameter in model.parameters())
    log = start_log(args, hvd, numel)
    warmup = min(args.warmup_steps, course.total - 1)
    started = time.perf_counter()
    while step < course.last:
        epoch, done = divmod(step, course.epoch_steps)
        end = min(course.epoch_steps, course.last - epoch * course.epoch_steps)
        losses, seconds = [], []
        for indices in batch_indices(len(train), args, epoch)[done:end]:
            step_started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = args.lr * lr_factor(step, warmup, course.total)
            batch = train[indices].to(device)
            optimizer.zero_grad()
            with local_ahead(optimizer, args) if args.local_steps else ahead(compression, model, args):
                with torch.autocast(device.type, torch.bfloat16, enabled=not args.float32):
                    loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
            if args.local_steps:
                # Gradients are this worker's own. Clipping reduced ones would cut off what had waited.
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - step_started)
            step += 1
            if args.checkpoint_dir and course.saves(step):
                save(args, hvd, step, partial(write_states, kept))

        if args.local_steps and step % args.local_steps:
            # A pause between two exchanges. The checkpoint is from before this one.
            optimizer.synchronize()
        perplexity = evaluate(model, held_out, args, device)
        mean_loss = hvd.allreduce(torch.tensor(statistics.fmean(losses)), name="mean_loss").item()
        if hvd.rank() == 0:
            log.write_epoch(
                epoch + 1,
                step=step,
                loss=mean_loss,
                traffic=measure_traffic(compression, numel, hvd).spread_over(max(args.local_steps, 1)),
                seconds=seconds,
                text=f"perplexity {perplexity:.2f}",
                perplexity=perplexity,
            )

    parameters = {name: parameter.detach().cpu().numpy() for name, parameter in model.named_parameters()}
    agreed = check_replicas(parameters, hvd.allgather_object)
    log.write("end", seconds=time.perf_counter() - started, parameter_hash=agreed)
    print_closing_table(args, log, hvd, numel, held_out="perplexity")


if __name__ == "__main__":
    main()
