"""Small calls of ops: what can be cut according to their rules, in the notation of `einsum`; see `Trial.claim`.

Every ordinary case is one op. `out`: the shapes of the results, for ops that are told sizes.
"""

import torch
import torch.nn.functional as F

aten = torch.ops.aten


def groups_of(x, weight):
    """How many groups a convolution has, from what a rank has of its channels."""
    return x.shape[1] // weight.shape[1]


def grouped(x, y, ends=None):
    """`_grouped_mm`; where a rank's part has rows that its kernel does not take, one product after the other."""
    if all(size % 4 == 0 for size in (*x.shape[-1:], *y.shape[-1:])):
        return aten._grouped_mm(x, y, ends)
    if ends is None:
        return x @ y
    parts = [slice(begin, end) for begin, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]
    if x.dim() == y.dim():
        return torch.stack([x[:, part] @ y[part] for part in parts])
    if x.dim() == 2:
        return torch.cat([x[part] @ matrix for part, matrix in zip(parts, y, strict=True)])
    return torch.cat([matrix @ y[:, part] for part, matrix in zip(parts, x, strict=True)], 1)


ENDS = torch.tensor([4, 8], dtype=torch.int32)
TALL, WIDE, MANY = torch.randn(8, 4), torch.randn(4, 8), torch.randn(2, 4, 4)
PRODUCTS = [
    (".a,.ab,.->.b", grouped, TALL, MANY, ENDS),
    (".ab,b.,.->a.", grouped, MANY, WIDE, ENDS),
    ("a.,.b,.->.ab", grouped, WIDE, TALL, ENDS),
    ("abc,acd->abd", grouped, MANY, MANY),
    ("a,b->ab", aten.ger, (3,), (4,)),
    ("abc,dc->abd", F.linear, (2, 3, 4), (6, 4)),
    ("ab,cb,c->ac", F.linear, (3, 4), (6, 4), (6,)),
    ("a,ba->b", F.linear, (4,), (6, 4)),
    ("abc,c->ab", F.linear, (2, 3, 4), (4,)),
    ("abc,c,->ab", F.linear, (2, 3, 4), (4,), ()),
    ("abc,abd,ecd->abe", F.bilinear, (2, 3, 4), (2, 3, 5), (6, 4, 5)),
    ("ab,ac,dbc,d->ad", F.bilinear, (3, 4), (3, 5), (6, 4, 5), (6,)),
    ("ab,bc->ac", torch.matmul, (3, 4), (4, 6)),
    ("a,ab->b", torch.matmul, (4,), (4, 6)),
    ("ab,b->a", torch.matmul, (3, 4), (4,)),
    ("a,a->", torch.matmul, (4,), (4,)),
    ("abc,cd->abd", torch.matmul, (2, 3, 4), (4, 6)),
    ("abc,acd->abd", torch.matmul, (2, 3, 4), (2, 4, 6)),
    ("a1bc,dce->adbe", torch.matmul, (2, 1, 3, 4), (5, 4, 6)),
    ("a,bac->bc", torch.matmul, (4,), (2, 4, 6)),
    ("a1,1b->ab", torch.matmul, (3, 1), (1, 6)),
    ("ab,bc->ac", torch.mm, (3, 4), (4, 6)),
    ("abc,acd->abd", torch.bmm, (2, 3, 4), (2, 4, 6)),
    ("ab,b->a", torch.mv, (3, 4), (4,)),
    ("a,a->", torch.dot, (4,), (4,)),
    ("ab,cb->ac", torch.inner, (3, 4), (4, 4)),
    ("abc,dc->abd", torch.inner, (2, 3, 4), (5, 4)),
    ("a,a->", torch.inner, (4,), (4,)),
    ("a,b->ab", torch.outer, (3,), (4,)),
    ("ab,bc->ac", torch.linalg.matmul, (3, 4), (4, 6)),
    ("abc,cd->abd", lambda x, y: torch.tensordot(x, y, dims=1), (2, 3, 4), (4, 6)),
    ("abc,bda->cd", lambda x, y: torch.tensordot(x, y, dims=([1, 0], [0, 2])), (2, 3, 4), (3, 5, 2)),
    ("ab,c->abc", lambda x, y: torch.tensordot(x, y, dims=0), (2, 3), (4,)),
    ("a,bc,ca->ba", torch.addmm, (6,), (3, 4), (4, 6)),
    ("a1,ab,bc->ac", torch.addmm, (3, 1), (3, 4), (4, 6)),
    ("ab,ac,cb->ab", lambda c, x, y: torch.addmm(c, x, y, beta=3, alpha=2), (3, 6), (3, 4), (4, 6)),
    ("ab,ac,cb->ab", lambda c, x, y: torch.addmm(c, x, y, beta=0), (3, 6), (3, 4), (4, 6)),
    ("a1b,acd,adb->acb", torch.baddbmm, (2, 1, 6), (2, 3, 4), (2, 4, 6)),
    (
        "abc,abd,adc->abc",
        lambda c, x, y: c.baddbmm(batch1=x, batch2=y, beta=0.5, alpha=2),
        (2, 3, 6),
        (2, 3, 4),
        (2, 4, 6),
    ),
    ("abc,abd,adc->abc", lambda c, x, y: c.baddbmm_(x, y, beta=0), (2, 3, 6), (2, 3, 4), (2, 4, 6)),
    ("ab,ac,cb->ab", lambda c, x, y: c.addmm_(x, y), (3, 6), (3, 4), (4, 6)),
    ("a,ab,b->a", torch.addmv, (3,), (3, 4), (4,)),
    ("abc,cd->abd", lambda x, y: torch.einsum("abc,cd->abd", x, y), (2, 3, 4), (4, 6)),
    ("ab,bc->ac", lambda x, y: torch.einsum("ij,jk", x, y), (3, 4), (4, 6)),
    ("abcd,abed->abce", lambda x, y: torch.einsum("bhid,bhjd->bhij", x, y), (2, 3, 4, 5), (2, 3, 4, 5)),
    ("..->.", lambda x: torch.einsum("ii->i", x), (4, 4)),
    ("..->", lambda x: torch.einsum("ii", x), (4, 4)),
    ("ab->b", lambda x: torch.einsum("ij->j", x), (3, 4)),
    ("ab->ba", lambda x: torch.einsum("ij->ji", x), (3, 4)),
    ("ab,cb,db->acd", lambda x, y, z: torch.einsum("ai,bi,ci->abc", x, y, z), (2, 4), (3, 4), (5, 4)),
    ("a1,bc->ac", lambda x, y: torch.einsum("ab,bc->ac", x, y), (3, 1), (4, 6)),
    ("1a,ba->ba", lambda x, y: torch.einsum("ab,ab->ab", x, y), (1, 4), (3, 4)),
    ("a,b->ab", lambda x, y: torch.einsum("a,b->ab", x, y), (3,), (4,)),
    ("abc,cd->abd", lambda x, y: torch.einsum("...ab,bc->...ac", x, y), (2, 3, 4), (4, 6)),
    ("a1bc,dce->adbe", lambda x, y: torch.einsum("...ij,...jk", x, y), (2, 1, 3, 4), (5, 4, 6)),
    ("abc,abd->cd", lambda x, y: torch.einsum("i...j,i...k->jk", x, y), (2, 3, 4), (2, 3, 5)),
    ("ab,bc->ca", lambda x, y: torch.einsum("iA,Ab", x, y), (3, 4), (4, 6)),
    ("..,..->..", torch.kron, (2, 3), (4, 2)),
]


attend = F.scaled_dot_product_attention


def shared(*args):
    """Attention in which several heads of the queries share one of the keys."""
    return attend(*args, enable_gqa=True)


ATTENTION = [
    ("abc.,ab..,ab.d->abcd", attend, (2, 4, 3, 5), (2, 4, 6, 5), (2, 4, 6, 7)),
    ("ab..,ab..,ab.c->ab.c", lambda q, k, v: attend(q, k, v, is_causal=True), (2, 4, 3, 5), (2, 4, 3, 5), (2, 4, 3, 5)),
    ("abc.,a1..,1b.d->abcd", attend, (2, 4, 3, 5), (2, 1, 6, 5), (1, 4, 6, 7)),
    ("ab.,a..,a.c->abc", attend, (4, 3, 5), (4, 6, 5), (4, 6, 7)),
    ("1ab.,ca..,ca.d,c1b.->cabd", attend, (1, 4, 3, 5), (2, 4, 6, 5), (2, 4, 6, 7), (2, 1, 3, 6)),
    ("abc.,ab..,ab.d,abc.->abcd", attend, (2, 4, 3, 5), (2, 4, 6, 5), (2, 4, 6, 7), (2, 4, 3, 6)),
    ("abc.,ab..,ab.d,b1.->abcd", attend, (2, 4, 3, 5), (2, 4, 6, 5), (2, 4, 6, 7), (4, 1, 6)),
    ("abc.,ab..,ab.d,c1->abcd", attend, (2, 4, 3, 5), (2, 4, 6, 5), (2, 4, 6, 7), (3, 1)),
    ("a(bc)d.,ab..,ab.e->a(bc)de", shared, (2, 12, 3, 5), (2, 4, 6, 5), (2, 4, 6, 7)),
    ("abc.,a1..,a1.d->abcd", shared, (2, 4, 3, 5), (2, 1, 6, 5), (2, 1, 6, 7)),
    ("abc.,ab..,ab.d->abcd", shared, (2, 4, 3, 5), (2, 4, 6, 5), (2, 4, 6, 7)),
    ("a(bc)d.,ab..,ab.e,a(bc)d.->a(bc)de", shared, (2, 6, 3, 5), (2, 2, 6, 5), (2, 2, 6, 7), (2, 6, 3, 6)),
    ("a(bcd)e.,ab..,a(bc).f->a(bcd)ef", shared, (2, 8, 3, 5), (2, 2, 6, 5), (2, 4, 6, 7)),
    ("....,....,....->....", lambda q, k, v: attend(q, k, v, dropout_p=0.5), (2, 4, 3, 5), (2, 4, 6, 5), (2, 4, 6, 7)),
]  # fmt: skip

CONVOLUTIONS = [
    ("ab.,cb.->ac.", F.conv1d, (2, 4, 8), (6, 4, 3)),
    ("ab.,cb.,c->ac.", F.conv1d, (2, 4, 8), (6, 4, 3), (6,)),
    ("ab..,cb.1,c->ac..", F.conv2d, (2, 4, 5, 5), (6, 4, 3, 1), (6,)),
    ("ab...,cb...->ac...", F.conv3d, (2, 4, 3, 3, 3), (6, 4, 2, 2, 2)),
    ("a..,ba..->b..", F.conv2d, (4, 5, 5), (6, 4, 3, 3)),
    (
        "ab.,b1.,b->ab.",
        lambda x, w, b: F.conv1d(x, w, b, padding=1, groups=groups_of(x, w)),
        (2, 4, 8),
        (4, 1, 3),
        (4,),
    ),
    (
        "a(bc).,(bd)c.,(bd)->a(bd).",
        lambda x, w, b: F.conv1d(x, w, b, groups=groups_of(x, w)),
        (2, 6, 8),
        (8, 3, 3),
        (8,),
    ),
    (
        "a(bc).,(bd)c.->a(bd).",
        lambda x, w: F.conv1d(x, w, padding="same", groups=groups_of(x, w)),
        (2, 12, 8),
        (24, 3, 3),
    ),
    ("ab.,bc.,c->ac.", F.conv_transpose1d, (2, 4, 8), (4, 6, 3), (6,)),
    ("ab..,bc..->ac..", F.conv_transpose2d, (2, 4, 3, 3), (4, 6, 2, 2)),
    ("ab...,bc...->ac...", F.conv_transpose3d, (2, 4, 3, 3, 3), (4, 6, 2, 2, 2)),
    # Groups x parts: of the same size in all, so that a rank can tell how many groups it has.
    (
        "ab.,bc.->a(bc).",
        lambda x, w: F.conv_transpose1d(x, w, groups=w.shape[0] if w.shape[1] == 2 else 4),
        (2, 4, 8),
        (4, 2, 3),
    ),
]

LOSSES = [
    ("ab,ab->ab", lambda x, y: F.mse_loss(x, y, reduction="none"), (3, 4), (3, 4)),
    ("ab,b->ab", lambda x, y: aten.huber_loss(x, y, 0, 0.5), (3, 4), (4,)),
    ("ab,ab,b->ab", lambda x, y, w: aten.binary_cross_entropy_with_logits(x, y, w, None, 0), (3, 4), (3, 4), (4,)),
    ("ab,ab,a->ab", lambda x, y, z: aten.margin_ranking_loss(x, y, z[:, None], 0.1, 0), (3, 4), (3, 4), (3,)),
    ("ab,ab->ab", lambda x, y: aten.smooth_l1_loss(x, y, 0), (3, 4), (3, 4)),
    ("ab,ab->ab", lambda x, y: aten.soft_margin_loss(x, y, 0), (3, 4), (3, 4)),
    ("ab,ab->ab", lambda x, y: aten.kl_div(x, y.exp(), 0), (3, 4), (3, 4)),
    ("ab,ab->ab", lambda x, y: aten.poisson_nll_loss(x, y, True, False, 1e-8, 0), (3, 4), (3, 4)),
    ("ab,ab->ab", lambda x, y: aten.hinge_embedding_loss(x, y.sign(), 1.0, 0), (3, 4), (3, 4)),
    ("ab,ab->ab", lambda x, y: aten.binary_cross_entropy(x.sigmoid(), y.sigmoid(), None, 0), (3, 4), (3, 4)),
    ("..,..->", lambda x, y: aten.l1_loss(x, y, 1), (3, 4), (3, 4)),
]
REDUCTIONS = [
    ("ab->", torch.sum, (3, 4)),
    ("abc->ac", lambda x: x.sum(1), (2, 3, 4)),
    ("abc->1b1", lambda x: x.sum((0, -1), keepdim=True), (2, 3, 4)),
    ("ab->a", lambda x: x.sum(-1, dtype=torch.float32), (3, 4)),
    ("ab->b", lambda x: x.nansum(0), (3, 4)),
    ("ab->", torch.mean, (3, 4)),
    ("abc->ac", lambda x: x.mean(1), (2, 4, 3)),
    ("abc->a11", lambda x: x.mean((1, 2), True), (2, 4, 3)),
    ("->", torch.sum, ()),
    ("a.b->ab", lambda x: x.amax(1), (2, 3, 4)),
    ("..a->11a", lambda x: x.amin((0, 1), True), (2, 3, 4)),
    ("..->", lambda x: x.max(), (3, 4)),
    ("a.->a,a", lambda x: x.max(1), (3, 4)),
    (".a->1a,1a", lambda x: x.min(0, True), (3, 4)),
    ("ab,b->ab", torch.max, (3, 4), (4,)),
    ("ab,a1->ab", torch.min, (3, 4), (3, 1)),
    ("a.->a", lambda x: x.argmax(1), (3, 4)),
    ("..->", lambda x: x.argmax(), (3, 4)),
    (".a->1a", lambda x: x.argmin(0, True), (3, 4)),
    ("a.->a", lambda x: x.prod(1), (3, 4)),
    ("..->", lambda x: x.prod(), (3, 4)),
    ("a.->a", lambda x: (x > 0).all(1), (3, 4)),
    (".a->1a", lambda x: (x > 0).any(0, True), (3, 4)),
    ("a.->a1", lambda x: x.logsumexp(1, True), (3, 4)),
    ("a.->a,a", lambda x: x.median(1), (3, 4)),
    ("..->", lambda x: x.nanmedian(), (3, 4)),
    ("a.->a", lambda x: x.var(1), (3, 4)),
    ("a.->a", lambda x: x.var(1, False), (3, 4)),
    ("a.->a1", lambda x: x.var(1, True, True), (3, 4)),
    ("..->", lambda x: x.var(unbiased=False), (3, 4)),
    (".a.->1a1", lambda x: x.var((0, 2), correction=0, keepdim=True), (2, 3, 4)),
    (".a->a", lambda x: x.std(0), (3, 4)),
    ("a.->a,a", lambda x: torch.var_mean(x, 1), (3, 4)),
    (".a->1a,1a", lambda x: torch.std_mean(x, 0, keepdim=True), (3, 4)),
    ("a.->a,a", lambda x: torch.aminmax(x, dim=1), (3, 4)),
    ("..->,", lambda x: torch.aminmax(x), (3, 4)),
    ("a.->a", lambda x: x.count_nonzero(1), (3, 4)),
    ("a.->a", lambda x: torch.linalg.vector_norm(x, 3, 1), (3, 4)),
    ("a.->a", lambda x: torch.linalg.norm(x, dim=1), (3, 4)),
    ("..->", lambda x: torch.linalg.norm(x), (3, 4)),
    ("..->", lambda x: x.norm(), (3, 4)),
    ("a.->a1", lambda x: aten.norm.ScalarOpt_dim(x, 2, [1], True), (3, 4)),
    ("a.->a,a", lambda x: x.kthvalue(2), (3, 4)),
    (".a->1a,1a", lambda x: x.kthvalue(2, 0, True), (3, 4)),
    ("a.->a", lambda x: x.quantile(0.5, 1), (3, 4)),
    ("..->..", lambda x: x.quantile(torch.tensor([0.5, 0.1]).double(), 1), (3, 4)),
    ("..->", lambda x: x.nanquantile(0.5), (3, 4)),
    ("a.b->ab", lambda x: torch.cosine_similarity(x, x + 1), (2, 3, 4)),
    ("a1.,b.->ab", lambda x, y: torch.cosine_similarity(x, y, -1), (2, 1, 4), (3, 4)),
    ("ab.,ac.->abc", torch.cdist, (2, 3, 4), (2, 5, 4)),
    (".->.", lambda x: torch.histc(x, 4), (6,)),
    (".->.", lambda x: torch.bincount(x), torch.tensor([0, 2, 1, 1])),
]

ORDERED = [
    (".a->.a", lambda x: torch.fft.fft(x, dim=0).real, (3, 4)),
    ("a.->a.", lambda x: torch.fft.ifft(x).abs(), (3, 4)),
    ("a.->a.", lambda x: torch.fft.irfft(x, 4), (3, 4)),
    ("a.->a.", lambda x: torch.fft.hfft(x, 4), (3, 4)),
    ("a.->a.", lambda x: torch.fft.ihfft(x).abs(), (3, 4)),
    ("..a->..a", lambda x: torch.fft.ifft2(x, dim=(0, 1)).abs(), (3, 4, 2)),
    ("a..->a..", lambda x: torch.fft.rfft2(x).abs(), (2, 3, 4)),
    ("a..->a..", lambda x: torch.fft.irfft2(x), (2, 3, 4)),
    ("a..->a..", lambda x: torch.fft.fftn(x, dim=(1, 2)).real, (2, 3, 4)),
    ("..->..", lambda x: torch.fft.ifftn(x).abs(), (3, 4)),
    ("a..->a..", lambda x: torch.fft.rfftn(x, dim=(1, 2)).abs(), (2, 3, 4)),
    ("a..->a..", lambda x: torch.fft.irfftn(x, dim=(1, 2)), (2, 3, 4)),
    ("a..->a..", lambda x: x.triu(), (2, 3, 4)),
    ("a..->a..", lambda x: x.tril_(), (2, 3, 4)),
    ("a.b->a.b", lambda x: x.softmax(1), (2, 3, 4)),
    ("a.->a.", lambda x: x.softmax(-1, torch.float32), (3, 4)),
    ("a.->a.", lambda x: aten._softmax(x, 1, False), (3, 4)),
    (".a->.a", lambda x: x.log_softmax(0), (3, 4)),
    ("a.->a.", lambda x: aten._log_softmax(x, 1, False), (3, 4)),
    ("a.->a.", lambda x: torch.special.softmax(x, 1), (3, 4)),
    ("a.->a.", lambda x: torch.special.log_softmax(x, 1), (3, 4)),
    (".a->.a", lambda x: x.cumsum(0), (3, 4)),
    ("a.->a.", lambda x: x.cumsum_(1), (3, 4)),
    ("a.->a.", lambda x: x.cumprod(1), (3, 4)),
    ("a.->a.", lambda x: x.logcumsumexp(1), (3, 4)),
    (".a->.a,.a", lambda x: x.cummax(0), (3, 4)),
    ("a.->a.,a.", lambda x: x.cummin(1), (3, 4)),
    ("a.->a.", lambda x: x.flip(1), (3, 4)),
    (".a.->.a.", lambda x: x.flip([0, -1]), (2, 3, 4)),
    ("a.->a.,a.", lambda x: x.sort(), (3, 4)),
    (".a->.a,.a", lambda x: x.sort(0, True), (3, 4)),
    (".a->.a,.a", lambda x: x.sort(stable=True, dim=0), (3, 4)),
    ("a.->a.,a.", lambda x: x.sort(stable=True), (3, 4)),
    ("a.->a.", lambda x: x.argsort(), (3, 4)),
    (".a->.a", lambda x: x.argsort(0), (3, 4)),
    (".a->.a", lambda x: x.argsort(dim=0, stable=True), (3, 4)),
    (".a->.a", lambda x: x.roll(1, 0), (3, 4)),
    (".a.->.a.", lambda x: x.roll((1, 2), (0, -1)), (2, 3, 4)),
    ("..->..", lambda x: x.roll(1), (3, 4)),
    ("a[b|b]->ab", lambda x: F.glu(x), (3, 8)),
    ("[a|a]b->ab", lambda x: F.glu(x, 0), (6, 3)),
    ("a.->a.", lambda x: x.diff(), (3, 4)),
    (".a->.a", lambda x: x.diff(dim=0), (3, 4)),
    ("[1|.]a->.a", lambda x: x.diff(1, 0, x[:1]), (3, 4)),
    ("a.,a1,a.->a.", lambda x, y, z: x.diff(1, -1, y, z), (3, 4), (3, 1), (3, 2)),
    ("a.->a..", lambda x: x.unfold(1, 2, 1), (3, 4)),
    ("a.b->a.b.", lambda x: x.unfold(-2, 3, 2), (2, 8, 4)),
    ("a.->a.,a.", lambda x: x.topk(2), (3, 4)),
    (".a->.a,.a", lambda x: x.topk(2, 0), (3, 4)),
    ("a..->a..", lambda x: x.tril(), (2, 3, 4)),
    ("a..->a..", lambda x: x.triu_(1), (2, 3, 4)),
    ("a.->a.", lambda x: torch.fft.rfft(x, dim=1).real, (3, 4)),
    ("a..->a..", lambda x: torch.fft.fft2(x).imag, (2, 3, 4)),
    ("...->...", lambda x: torch.renorm(x, 2, 1, 3.0), (2, 3, 4)),
    ("a.,a.->a.", lambda x, y: torch.cross(x, y, dim=1), (4, 3), (4, 3)),
    ("..,..->..", lambda x, y: aten.cross(x, y), (3, 3), (3, 3)),
    (".a,.a->.a", lambda x, y: torch.linalg.cross(x, y, dim=0), (3, 4), (3, 4)),
]

NORMS = [
    ("ab.,.->ab.,ab1", lambda x, w: aten._fused_rms_norm(x, [4], w, 1e-5), (2, 3, 4), (4,)),
    ("ab.,.,.->ab.", lambda x, w, b: F.layer_norm(x, (4,), w, b), (2, 3, 4), (4,), (4,)),
    ("a..->a..", lambda x: F.layer_norm(x, (3, 4)), (2, 3, 4)),
    ("ab.,.->ab.", lambda x, w: F.rms_norm(x, (4,), w), (2, 3, 4), (4,)),
    ("ab.,.,.->ab.,ab1,ab1", lambda x, w, b: aten.native_layer_norm(x, [4], w, b, 1e-5), (2, 3, 4), (4,), (4,)),
    ("a(b.).,(b.),(b.)->a(b.).", lambda x, w, b: F.group_norm(x, x.shape[1] // 2, w, b), (2, 6, 4), (6,), (6,)),
    ("a..->a..", lambda x: F.group_norm(x, 1), (2, 6, 4)),
    ("abc,b,b,b,b->abc", lambda x, m, v, w, b: F.batch_norm(x, m, v.exp(), w, b), (2, 6, 4), (6,), (6,), (6,), (6,)),
    (".a.,a,a->.a.", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (3, 6, 4), (6,), (6,)),
    ("ab.,b,b->ab.", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (2, 6, 4), (6,), (6,)),
    (".a.,a,a->.a.", lambda x, m, v: F.instance_norm(x, m, v), (2, 6, 4), (6,), (6,)),
    ("a..,a11->a..", lambda v, g: torch._weight_norm(v, g, 0), (4, 3, 2), (4, 1, 1)),
    ("..a,11a->..a", lambda v, g: torch._weight_norm(v, g, 2), (4, 3, 2), (1, 1, 2)),
]

MATRICES = [
    ("ab..,ab..->ab..", lambda x, y: torch.linalg.solve_triangular(x, y, upper=True), (2, 4, 3, 3), (2, 4, 3, 5)),
    ("1a..,ba..->ba..", lambda x, y: torch.linalg.solve_triangular(x, y, upper=True), (1, 4, 3, 3), (2, 4, 3, 5)),
    ("a..,a..->a..,a..,a.,a", aten._linalg_solve_ex, (4, 3, 3), (4, 3, 5)),
    ("...,..->..,...,..,.", aten._linalg_solve_ex, (4, 3, 3), (4, 3)),
    ("ab..->ab..,ab", aten.linalg_inv_ex, (2, 4, 3, 3)),
    ("a..->a..,a", aten.linalg_cholesky_ex, (4, 3, 3)),
    ("a..->a..,a.,a", aten.linalg_lu_factor_ex, (4, 3, 3)),
    ("a..->a..,a..", torch.linalg.qr, (4, 3, 5)),
    ("a..->a..", aten.linalg_matrix_exp, (4, 3, 3)),
    ("a..->a,a..,a.", aten._linalg_det, (4, 3, 3)),
    ("a..->a,a,a..,a.", aten._linalg_slogdet, (4, 3, 3)),
    ("a..->a.,a..", aten._linalg_eigh, (4, 3, 3)),
    ("a..->a..,a.,a..", aten._linalg_svd, (4, 3, 5)),
    ("..->..", aten.linalg_matrix_exp, (3, 3)),
]

POOLS = [
    ("ab.->ab.", lambda x: F.avg_pool1d(x, 2), (2, 4, 8)),
    ("ab..->ab..", lambda x: F.avg_pool2d(x, 2), (2, 4, 6, 8)),
    ("ab...->ab...", lambda x: F.avg_pool3d(x, 2), (2, 4, 4, 4, 4)),
    ("ab.->ab.", lambda x: F.max_pool1d(x, 2), (2, 4, 8)),
    ("a..->a..", lambda x: F.max_pool2d(x, 2), (4, 6, 8)),
    ("ab...->ab...", lambda x: F.max_pool3d(x, 2), (2, 4, 4, 4, 4)),
    ("ab.->ab.,ab.", lambda x: F.max_pool1d(x, 2, return_indices=True), (2, 4, 8)),
    ("ab..->ab..,ab..", lambda x: F.max_pool2d(x, 2, return_indices=True), (2, 4, 6, 8)),
    ("ab...->ab...,ab...", lambda x: F.max_pool3d(x, 2, return_indices=True), (2, 4, 4, 4, 4)),
    ("ab.->ab1", lambda x: F.adaptive_avg_pool1d(x, 1), (2, 4, 8)),
    ("ab..->ab..", lambda x: F.adaptive_avg_pool2d(x, 3), (2, 4, 6, 8)),
    ("ab..->ab..", lambda x: aten._adaptive_avg_pool2d(x, [3, 3]), (2, 4, 6, 8)),
    ("ab...->ab111", lambda x: F.adaptive_avg_pool3d(x, 1), (2, 4, 4, 4, 4)),
    ("ab...->ab111", lambda x: aten._adaptive_avg_pool3d(x, [1, 1, 1]), (2, 4, 4, 4, 4)),
    ("ab.->ab.,ab.", lambda x: F.adaptive_max_pool1d(x, 2, return_indices=True), (2, 4, 8)),
    ("ab..->ab..", lambda x: F.adaptive_max_pool2d(x, 2), (2, 4, 6, 8)),
    ("ab...->ab...", lambda x: F.adaptive_max_pool3d(x, 2), (2, 4, 4, 4, 4)),
    ("ab.->ab.", lambda x: F.interpolate(x, scale_factor=2), (2, 4, 3)),
    ("ab..->ab..", lambda x: F.interpolate(x, scale_factor=2), (2, 4, 3, 3)),
    ("ab...->ab...", lambda x: F.interpolate(x, scale_factor=2), (2, 4, 3, 3, 3)),
    ("ab.->ab.", lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), (2, 4, 3)),
    ("ab..->ab..", lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), (2, 4, 3, 3)),
    ("ab...->ab...", lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), (2, 4, 3, 3, 3)),
    ("ab.->ab.", lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (2, 4, 3)),
    ("ab..->ab..", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (2, 4, 3, 3)),
    ("ab..->ab..", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True), (2, 4, 3, 3)),
    ("ab..->ab..", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (2, 4, 3, 3)),
    ("ab..->ab..", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", antialias=True), (2, 4, 3, 3)),
    ("ab...->ab...", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (2, 4, 3, 3, 3)),
    ("ab.->ab.", lambda x: aten.reflection_pad1d(x, [1, 2]), (2, 4, 8)),
    ("ab..->ab..", lambda x: aten.reflection_pad2d(x, [1, 2, 0, 1]), (2, 4, 8, 3)),
    ("ab...->ab...", lambda x: aten.reflection_pad3d(x, [1, 1, 1, 1, 1, 1]), (2, 4, 3, 3, 3)),
    ("ab.->ab.", lambda x: aten.replication_pad1d(x, [1, 2]), (2, 4, 8)),
    ("ab..->ab..", lambda x: aten.replication_pad2d(x, [1, 2, 0, 1]), (2, 4, 8, 3)),
    ("ab...->ab...", lambda x: aten.replication_pad3d(x, [1, 1, 1, 1, 1, 1]), (2, 4, 3, 3, 3)),
    ("ab..,acd.->abcd", lambda x, y: F.grid_sample(x, y, align_corners=False), (2, 3, 4, 4), (2, 5, 6, 2)),
    ("ab...,acde.->abcde", lambda x, y: F.grid_sample(x, y, align_corners=True), (2, 3, 4, 4, 4), (2, 5, 6, 4, 3)),
    ("a..->a...", lambda x: F.affine_grid(x, [len(x), 3, 4, 5], align_corners=False), (2, 2, 3)),
    ("ab..->a(b.).", lambda x: F.unfold(x, 2), (2, 3, 4, 4)),
    ("a(b.).->ab..", lambda x: F.fold(x, (4, 4), 2), (2, 12, 9)),
]
of_lstm, of_gru, of_rnn = ([torch.randn(gates, size, dtype=torch.float64) for size in (2, 4)] for gates in (16, 12, 4))
RECURRENT = [
    ("a..,1a.,1a.->a..,1a.,1a.", lambda x, *state: aten.lstm(x, state, of_lstm, False, 1, 0.0, False, False, True),
     (3, 5, 2), (1, 3, 4), (1, 3, 4)),
    (".a.,1a.->.a.,1a.", lambda x, h: aten.gru(x, h, of_gru, False, 1, 0.0, False, False, False), (5, 3, 2), (1, 3, 4)),
    (".a.,1a.->.a.,1a.", lambda x, h: aten.rnn_tanh(x, h, of_rnn, False, 1, 0.0, False, False, False),
     (5, 3, 2), (1, 3, 4)),
    ("a..,1a.->a..,1a.", lambda x, h: aten.rnn_relu(x, h, of_rnn, False, 1, 0.0, False, False, True),
     (3, 5, 2), (1, 3, 4)),
    ("a.,a.,a.->a.,a.", lambda x, *state: aten.lstm_cell(x, state, *of_lstm), (3, 2), (3, 4), (3, 4)),
    ("a.,a.->a.", lambda x, h: aten.gru_cell(x, h, *of_gru), (3, 2), (3, 4)),
    ("a.,a.->a.", lambda x, h: aten.rnn_tanh_cell(x, h, *of_rnn), (3, 2), (3, 4)),
    ("a.,a.->a.", lambda x, h: aten.rnn_relu_cell(x, h, *of_rnn), (3, 2), (3, 4)),
    (".a.,1a.,..,..->.a.,1a.", lambda x, h, *w: aten.gru(x, h, w, False, 1, 0.0, False, False, False),
     (5, 3, 2), (1, 3, 4), (12, 2), (12, 4)),
    ("a.,a.,..,..->a.", lambda x, h, *w: aten.gru_cell(x, h, *w), (3, 2), (3, 4), (12, 2), (12, 4)),
]  # fmt: skip
"""Layers and cells whose matrices stay whole, whoever reads them."""
