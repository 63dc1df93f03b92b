#!/bin/sh
# lm-eval: scored choices by completions. It tokenizes through the service (/tokenizer_info, /tokenize), so it needs no
# files of the model. Arguments: the service's address, then options such as `--tasks arc_easy`.
URL=$1
shift
exec lm_eval --model local-completions \
    --model_args "base_url=$URL/v1/completions,model=tiny-gpt-oss,num_concurrent=8" "$@"
