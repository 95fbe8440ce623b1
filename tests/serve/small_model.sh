#!/bin/sh
# Usage: small_model.sh ASSAY FOLDER. Writes FOLDER/run, a small trained model with a tokenizer.
set -eu
assay=$1 source=$(dirname "$0")/../.. folder=$2
rm -rf "$folder" && mkdir -p "$folder/text"
cp "$source"/docs/*.md "$folder/text"
"$assay" data prepare --tokenizer "$source/tests/golden/bpe2000.model" -o "$folder/store" \
  --domain "docs=*.md" "$folder/text" --threads 1
"$assay" train "$source/plans/models/smoke.toml" --data "$folder/store" -o "$folder/run" \
  --set 'model.pattern=["attention"]' --set model.channel_mixer=swiglu --device cpu --threads 1
