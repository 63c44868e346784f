"""Models of sound, series and fields, as people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.bench.wild_cases import (
    TOTAL,
    Attend,
    Block,
    Wild,
    ce,
    mlp,
    mse,
    noise,
    rows,
    whole,
    wild,
)


class Conformer(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.f1, self.f2, self.attn = mlp(16, 32, 16), mlp(16, 32, 16), Attend(16)
        self.pw1, self.pw2 = nn.Conv1d(16, 32, 1), nn.Conv1d(16, 16, 1)
        self.dw, self.norm = nn.Conv1d(16, 16, 5, padding=2, groups=16), norm
        self.ln = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.f1(x)
        x = x + self.attn(self.ln(x))
        y = F.glu(self.pw1(x.mT), 1)
        x = x + self.pw2(F.silu(self.norm(self.dw(y)))).mT
        return self.ln(x + 0.5 * self.f2(x))


class Speech(nn.Module):
    def __init__(self, batchnorm: bool) -> None:
        super().__init__()
        self.sub = nn.Conv1d(12, 16, 3, 2, 1)
        norms = [nn.BatchNorm1d(16) if batchnorm else nn.GroupNorm(4, 16) for _ in range(2)]
        self.layers = nn.ModuleList(Conformer(n) for n in norms)
        self.out = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.sub(x).mT
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@wild
def conformer_batchnorm() -> Wild:
    return Wild(Speech(True), rows(12, 16), whole(6, 8), ce, coupled=True)


@wild
def conformer_ctc() -> Wild:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        lengths = torch.full((len(o),), o.shape[1])
        return F.ctc_loss(
            o.log_softmax(-1).transpose(0, 1), t, lengths, torch.full_like(lengths, 3)
        )

    return Wild(Speech(False), rows(12, 16), whole(5, 3) + 1, loss)


class Wav2Vec(nn.Module):
    """Convolutions, quantised targets by straight-through softmax, masked positions."""

    def __init__(self) -> None:
        super().__init__()
        self.feature = nn.Sequential(nn.Conv1d(1, 8, 4, 4), nn.GELU(), nn.Conv1d(8, 16, 2, 2))
        self.mask = nn.Parameter(noise(16))
        self.codes, self.score = nn.Parameter(noise(6, 16)), nn.Linear(16, 6)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, wave: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        z = self.feature(wave[:, None]).mT
        soft = self.score(z).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), 6).to(soft.dtype)
        q = (hard + soft - soft.detach()) @ self.codes
        x = torch.where(masked[..., None] > 0, self.mask, z)
        for block in self.blocks:
            x = block(x)
        return x, q


@wild
def wav2vec() -> Wild:
    def loss(o: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
        c, q = o
        scores = F.cosine_similarity(c[:, :, None], q[:, None], dim=-1) / 0.5
        at = torch.arange(c.shape[1]).expand(len(c), -1)
        return F.cross_entropy(scores.flatten(0, 1), at.flatten())

    given = (rows(64), rows(8, seed=9))
    return Wild(Wav2Vec(), given, rows(seed=8), loss)


class Tacotron(nn.Module):
    """An LSTM cell that attends and feeds its own output back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = (
            nn.Embedding(20, 16),
            nn.LSTM(16, 8, batch_first=True, bidirectional=True),
        )
        self.cell, self.query = nn.LSTMCell(16 + 6, 16), nn.Linear(16, 16)
        self.out, self.stop = nn.Linear(32, 6), nn.Linear(32, 1)

    def forward(self, text: Tensor, mels: Tensor) -> tuple[Tensor, Tensor]:
        memory, _ = self.encoder(self.embed(text))
        b, n, _ = mels.shape
        h = c = memory.new_zeros(b, 16)
        context, frame = memory.new_zeros(b, 16), mels.new_zeros(b, 6)
        frames, stops = [], []
        for t in range(n):
            h, c = self.cell(torch.cat([context, frame], -1), (h, c))
            w = (memory @ self.query(h)[..., None]).softmax(1)
            context = (w * memory).sum(1)
            both = torch.cat([h, context], -1)
            frames.append(self.out(both))
            stops.append(self.stop(both))
            frame = mels[:, t] if self.training else frames[-1]
        return torch.stack(frames, 1), torch.cat(stops, 1)


@wild
def tacotron() -> Wild:
    mels = rows(5, 6, seed=7)

    def loss(o: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
        return F.mse_loss(o[0], t) + F.binary_cross_entropy_with_logits(o[1], torch.ones_like(o[1]))

    return Wild(Tacotron(), (whole(20, 7), mels), mels, loss)


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.rnn = kind(12, 16, layers, batch_first=True)
        self.out = nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(ids))[0])


@wild
def lstm_tagger() -> Wild:
    return Wild(Tagger(nn.LSTM), whole(20, 8), whole(5, 8), ce)


@wild
def gru_tagger() -> Wild:
    return Wild(Tagger(nn.GRU), whole(20, 8), whole(5, 8), ce)


@wild
def rnn_tagger() -> Wild:
    return Wild(Tagger(nn.RNN), whole(20, 8), whole(5, 8), ce)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(20, 12), nn.LSTM(12, 16, batch_first=True)
        self.out = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=8)
        return self.out(out.sum(1) / lengths[:, None])


@wild
def packed_lstm() -> Wild:
    return Wild(Packed(), (whole(20, 8), whole(8) + 1), whole(5, seed=4), F.cross_entropy)


class Stateful(nn.Module):
    """Truncated backpropagation: the hidden state is kept between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = (
            nn.Embedding(20, 12),
            nn.GRU(12, 16, batch_first=True),
            nn.Linear(16, 20),
        )
        self.state: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        state = self.state if self.training else None
        out, new = self.rnn(self.embed(ids), state)
        self.state = new.detach()
        return self.out(out)


@wild
def stateful_gru() -> Wild:
    return Wild(Stateful(), whole(20, 8), whole(20, 8, seed=5), ce)


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv1d(1, 8, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.out = nn.Conv1d(8, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.inp(x[:, None]), 0
        for i, (d, s) in enumerate(zip(self.dilated, self.skips, strict=True)):
            a, b = d(F.pad(x, (2**i, 0))).chunk(2, 1)
            h = s(a.tanh() * b.sigmoid())
            x, total = x + h, total + h
        return self.out(F.relu(total)).mT


@wild
def wavenet() -> Wild:
    return Wild(WaveNet(), rows(16), whole(10, 16), ce)


class Stft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.net = nn.Sequential(
            nn.Conv1d(9, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 9, 3, padding=1)
        )

    def forward(self, wave: Tensor) -> Tensor:
        z = torch.stft(wave, 16, 4, window=self.window, return_complex=True)
        return torch.istft(z * self.net(z.abs()).sigmoid(), 16, 4, window=self.window, length=64)


@wild
def stft_mask() -> Wild:
    return Wild(Stft(), rows(64), rows(64, seed=6), mse)


class Fno(nn.Module):
    """Fourier neural operator: complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(1, 8), nn.Linear(8, 1)
        self.spectral = nn.ParameterList(
            nn.Parameter(
                0.2
                * torch.randn(
                    8,
                    8,
                    5,
                    dtype=torch.complex64
                    if torch.get_default_dtype() == torch.float32
                    else torch.complex128,
                )
            )
            for _ in range(2)
        )
        self.local = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x[..., None]).mT
        for w, c in zip(self.spectral, self.local, strict=True):
            z = torch.fft.rfft(x)
            low = torch.einsum("bix,iox->box", z[..., :5], w)
            y = torch.fft.irfft(F.pad(low, (0, z.shape[-1] - 5)), n=x.shape[-1])
            x = F.gelu(y + c(x))
        return self.out(x.mT).squeeze(-1)


@wild
def fourier_operator() -> Wild:
    return Wild(Fno(), rows(16), rows(16, seed=4), mse)


class S4d(nn.Module):
    """A diagonal state space by complex parameters and a convolution through fft."""

    def __init__(self) -> None:
        super().__init__()
        cd = torch.complex64 if torch.get_default_dtype() == torch.float32 else torch.complex128
        self.c = nn.Parameter(torch.randn(8, 4, dtype=cd))
        self.log_a, self.im = nn.Parameter(-torch.rand(8, 4)), nn.Parameter(torch.rand(8, 4))
        self.mix, self.inp = nn.Linear(8, 5), nn.Linear(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        a = torch.complex(-self.log_a.exp(), self.im)
        kernel = 2 * (self.c[..., None] * torch.exp(a[..., None] * torch.arange(n))).sum(1).real
        u = self.inp(x[..., None]).mT
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * n) * torch.fft.rfft(kernel, 2 * n), 2 * n)[
            ..., :n
        ]
        return self.mix(y.mean(-1))


@wild
def s4d_complex_parameters() -> Wild:
    return Wild(S4d(), rows(16), whole(5), F.cross_entropy)


class Informer(nn.Module):
    """A forecaster with normalisation per sample taken off and put back (RevIN)."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.embed, self.blocks = nn.Linear(16, 16), nn.ModuleList(Block(16) for _ in range(2))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(1, keepdim=True).detach(), x.std(1, keepdim=True).detach() + 1e-5
        h = self.embed((((x - mean) / std) * self.gain + self.bias).mT)
        for block in self.blocks:
            h = block(h)
        return (self.out(h).mT - self.bias) / self.gain * std + mean


@wild
def forecaster_revin() -> Wild:
    return Wild(Informer(), rows(16, 3), rows(4, 3, seed=6), mse)


class Ode(nn.Module):
    """Runge-Kutta through a field; the last step of adaptive length looks at the batch."""

    def __init__(self, adaptive: bool) -> None:
        super().__init__()
        self.field, self.out, self.adaptive = mlp(4, 16, 4, act=nn.Tanh), nn.Linear(4, 2), adaptive

    def forward(self, x: Tensor) -> Tensor:
        t, h = 0.0, 0.25
        while t < 1.0:
            k1 = self.field(x)
            k2 = self.field(x + h * k1)
            if self.adaptive and (k2 - k1).abs().max().item() > 0.3 and h > 0.06:
                h = h / 2
                continue
            x, t = x + h * (k1 + k2) / 2, t + h
        return self.out(x)


@wild
def neural_ode() -> Wild:
    return Wild(Ode(False), rows(4), rows(2, seed=3), mse)


@wild
def neural_ode_adaptive() -> Wild:
    return Wild(Ode(True), rows(4), rows(2, seed=3), mse)


class Equilibrium(nn.Module):
    """A fixed point to a tolerance over the batch, then one step with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.w, self.out = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.w.weight.data *= 0.5

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.inp(x), x.new_zeros(len(x), 12)
        with torch.no_grad():
            for _ in range(20):
                new = torch.tanh(self.w(z) + u)
                if (new - z).norm() < 1e-2:
                    break
                z = new
        return self.out(torch.tanh(self.w(z.detach()) + u))


@wild
def deep_equilibrium() -> Wild:
    return Wild(Equilibrium(), rows(6), rows(3, seed=4), mse)


@wild
def temporal_conv_weight_norm() -> Wild:
    from torch.nn.utils.parametrizations import weight_norm

    model = nn.Sequential(
        weight_norm(nn.Conv1d(3, 8, 3, padding=1)), nn.ReLU(),
        weight_norm(nn.Conv1d(8, 8, 3, padding=1)), nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip
    assert TOTAL
    return Wild(model, rows(3, 16), rows(4, seed=4), mse)
