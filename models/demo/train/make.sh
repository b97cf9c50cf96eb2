#!/bin/sh
# Make the demo model from nothing: text, tokenizer, weights, golden file, random fixtures.
# usage: sh make.sh [MINUTES]   (44 minutes on one core of a server CPU by default; needs Python 3.11, pip, apt-get and dpkg-deb)
set -eu
cd "$(dirname "$0")"
work=${WORK:-$(mktemp -d)} fixtures=../../../tests/fixtures
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q -r requirements.txt
py="$work/venv/bin/python"
export PYTHONDONTWRITEBYTECODE=1
[ -f "$work/text.txt" ] || "$py" texts.py "$work/text.txt"
"$py" tok.py "$work/text.txt" qa.jsonl ..
"$py" train.py .. qa.jsonl "$work/text.txt" --minutes "${1:-44}"
"$py" check.py .. qa.jsonl "$work/text.txt"
"$py" golden.py .. "$fixtures/demo_golden.json"
"$py" make_random.py "$fixtures"
