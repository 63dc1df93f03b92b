#!/bin/sh
# guidellm: load of synthetic prompts. Arguments: the service's address, the folder of the tokenizer, then options such
# as `--constraint kind=max_duration,seconds=30`.
URL=$1
TOKENIZER=$2
shift 2
exec guidellm run --backend "kind=openai_http,target=$URL" --tokenizer "kind=hf_auto,model=$TOKENIZER" \
    --data kind=synthetic_text,prompt_tokens=128,output_tokens=64 --profile kind=concurrent,streams=8 "$@"
