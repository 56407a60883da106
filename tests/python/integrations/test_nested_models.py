"""Converted models of torch, timm and transformers: the same function, and still models of their library."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import allfinite
from support.bounds import assert_same_bits, relative_l2
from support.models import NESTED, Nested

# Stock and converted model round at the same linear layers, independently; the ratio of two such errors over some 1000
# elements stays within 1.5. 4e-7: transformers' norms compute in fp32 in the float64 reference, too.
FACTOR, FLOOR = 1.5, 4e-7


@pytest.fixture(params=NESTED)
def nested(request: pytest.FixtureRequest) -> Nested:
    return NESTED[request.param]


def gradients(model: nn.Module, case: Nested) -> torch.Tensor:
    """The gradient of all parameters in one row, of a sum with weights of its own for each output."""
    model.zero_grad()
    out = case.run(model)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64).to(out.dtype)
    (out * weights).sum().backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_outputs_and_gradients(nested: Nested, dtype: torch.dtype):
    """Against the stock model in a wider type, the converted one is no further off than the stock one is."""
    stock = nested.build().to(dtype)
    wide = copy.deepcopy(stock).to(torch.float64 if dtype == torch.float32 else torch.float32)
    converted = copy.deepcopy(stock)
    nested.convert(converted)
    for what, of in (("output", nested.run), ("gradient", lambda model: gradients(model, nested))):
        exact = of(wide).detach().double()
        ours, theirs = (relative_l2(of(model).detach(), exact) for model in (converted, stock))
        assert ours <= FACTOR * theirs + FLOOR, f"{what}: {ours:.3g}, stock {theirs:.3g}"


def test_f1_finite_where_the_fp16_original_is_not(nested: Nested):
    """F1: logits beyond 65504 are infinite where they are stored in fp16, and the output NaN; here nothing is."""
    model = nested.build()
    nested.sharpen(model)
    model.half()
    with torch.no_grad():
        assert not nested.run(model).isfinite().all()
        nested.convert(model)
        assert nested.run(model).isfinite().all()
    assert gradients(model.train(), nested).isfinite().all()


def test_undo_gives_the_stock_bits(nested: Nested):
    """The report takes everything back: same classes, same bits; transformers' attention by its own call."""
    model = nested.build()
    classes, before = [type(m) for m in model.modules()], nested.run(model)
    report = nested.convert(model)
    report.undo()
    if nested.by_name:
        model.set_attn_implementation("eager")
    assert [type(m) for m in model.modules()] == classes
    assert_same_bits(nested.run(model).detach(), before.detach())


def test_state_dicts_go_both_ways(nested: Nested):
    """A checkpoint of the stock model loads into a converted one, and back."""
    stock, converted, back = nested.build(), nested.build(), nested.build()
    nested.convert(converted)
    assert list(converted.state_dict()) == list(stock.state_dict())
    converted.load_state_dict(stock.state_dict())
    back.load_state_dict(converted.state_dict())
    assert_same_bits(nested.run(back).detach(), nested.run(stock).detach())
    assert relative_l2(nested.run(converted).detach(), nested.run(stock).detach().double()) < 1e-5


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_stay_converted(nested: Nested, way):
    """An EMA copy and a pickled model run through allfinite, with the same bits."""
    model = nested.build()
    nested.convert(model)
    other = way(model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert_same_bits(nested.run(other).detach(), nested.run(model).detach())


def test_compiles_in_one_graph(nested: Nested):
    """torch.compile(fullgraph=True), forward and backward, as the stock model."""
    model = nested.build()
    nested.convert(model)
    want = nested.run(model), gradients(model, nested)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = nested.run(compiled), gradients(compiled, nested)
    torch.testing.assert_close(got, want)  # the graph decomposes some of the other ops


def test_exports(nested: Nested):
    """torch.export, whose graph holds allfinite's ops and gives the same outputs."""
    model, data = nested.build(), nested.data()
    nested.convert(model)
    program = torch.export.export(model, (), data, strict=False)
    assert any("allfinite" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(nested.output(program.module()(**data)), nested.run(model))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(nested: Nested, use_reentrant: bool):
    """The forward that is run again in backward gives the same gradients, bit for bit."""
    model = nested.build().train()
    nested.convert(model)
    want = gradients(model, nested)
    for block in blocks(model):
        checkpointed(block, use_reentrant)
    assert_same_bits(gradients(model, nested), want)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_transformers_own_checkpointing():
    """gradient_checkpointing_enable, which transformers' trainer calls."""
    case = NESTED["llama"]
    model = case.build().train()
    case.convert(model)
    want = gradients(model, case)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_bits(gradients(model, case), want)


def test_under_autocast(nested: Nested):
    """torch.autocast in bf16 with fp32 parameters: the dtype of the stock model, and no further from fp32 than it."""
    stock = nested.build()
    exact = nested.run(stock).detach().double()
    converted = copy.deepcopy(stock)
    nested.convert(converted)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = nested.run(stock), nested.run(converted)
    assert ours.dtype == theirs.dtype
    assert relative_l2(ours.detach(), exact) <= FACTOR * relative_l2(theirs.detach(), exact)
    (ours.float().square().sum()).backward()
    assert all(p.grad.isfinite().all() for p in converted.parameters() if p.grad is not None)


def test_f7_a_sequence_of_padding_alone():
    """F7: a batch with an empty sequence: torch's encoder and eager attention give NaN or attend to the padding."""
    for name in ("encoder", "bert"):
        case = NESTED[name]
        model, data = case.build().train(), case.data()
        case.convert(model)
        if name == "encoder":
            data["src_key_padding_mask"][1] = -torch.inf
        else:
            data["attention_mask"][1] = 0
        case.output(model(**data)).square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_the_report_names_the_line_for_transformers():
    """convert leaves attention that is chosen by name, and says how to choose; then it has nothing to say."""
    pytest.importorskip("allfinite.integrations.transformers")
    model = NESTED["bert"].build()
    report = allfinite.convert(model)
    assert [left.name for left in report.left] == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    assert all("model.set_attn_implementation('allfinite')" in left.reason for left in report.left)
    model.set_attn_implementation("allfinite")
    assert not allfinite.convert(model).left


def blocks(model: nn.Module) -> list[nn.Module]:
    """The Transformer blocks of the model."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) == 2]
    return list(lists[0])


def checkpointed(block: nn.Module, use_reentrant: bool) -> None:
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(
        lambda *inner: forward(*inner, **kwargs), *args, use_reentrant=use_reentrant
    )
