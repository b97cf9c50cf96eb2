"""Fetch the public-domain English of the training mix.  usage: texts.py OUTFILE

Two sources, both from ordinary package archives, so that anybody can get the same bytes:
  Shakespeare's works   public domain; inside the PyPI wheel aiperf 0.13.0 (package: Apache-2.0)
  Jane Austen's novels  public domain; inside Debian's r-cran-janeaustenr 1.0.0 (package: MIT)
The first has no apostrophes and few full stops, the second is well punctuated prose.
"""
import bz2, lzma, re, struct, subprocess, sys, tempfile, zipfile, zlib
from pathlib import Path


def shakespeare(tmp):
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp, "aiperf==0.13.0"], check=True)
    wheel = next(Path(tmp).glob("aiperf*.whl"))
    return zipfile.ZipFile(wheel).read("aiperf/dataset/generator/assets/shakespeare.txt").decode()


def r_strings(raw):
    """The character vector in one R object serialised as XDR (what the package's .rdb holds)."""
    pos = 2 + 12  # "X\n", then three ints: format version, writer, minimal reader
    if raw[2:6] == b"\0\0\0\3":  # version 3 names the native encoding too
        pos += 4 + struct.unpack(">i", raw[pos:pos + 4])[0]
    flags, n = struct.unpack(">ii", raw[pos:pos + 8])
    if flags & 0xFF != 16:  # STRSXP
        return []
    pos, out = pos + 8, []
    for _ in range(n):
        size = struct.unpack(">i", raw[pos + 4:pos + 8])[0]
        out.append(raw[pos + 8:pos + 8 + max(size, 0)].decode("utf-8", "replace"))
        pos += 8 + max(size, 0)
    return out


def austen(tmp):
    subprocess.run(["apt-get", "download", "-q", "r-cran-janeaustenr"], check=True, cwd=tmp)
    subprocess.run(["dpkg-deb", "-x", str(next(Path(tmp).glob("r-cran-janeaustenr*.deb"))), tmp], check=True)
    data = next(Path(tmp).rglob("janeaustenr/data/Rdata.rdb")).read_bytes()
    books, pos = [], 0
    while pos < len(data):  # chunks of: 4-byte size, optional type letter, compressed stream
        kind = data[pos + 4:pos + 5]
        if kind == b"2":
            d, skip = bz2.BZ2Decompressor(), 5
        elif kind == b"Z":
            d, skip = lzma.LZMADecompressor(), 5
        else:
            d, skip = zlib.decompressobj(), 4
        raw = d.decompress(data[pos + skip:])
        pos = len(data) - len(d.unused_data)
        books.append("\n".join(r_strings(raw)))
    # Join hard-wrapped lines: generated text should not break every 70 characters.
    return "\n\n".join(re.sub(r"(?<=\S)\n(?=\S)", " ", b) for b in books)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as t:
        # Documents are separated by form feeds; pack.py puts <|endoftext|> there.
        docs = [austen(t), shakespeare(t)]
        Path(sys.argv[1]).write_text("\f".join(docs), encoding="utf-8")
        print([len(d) for d in docs])
