#!/bin/bash
# A loop over items that keeps what it has computed in a file for each tenth item. It knows nothing of Tiphys.
say() { echo "{\"event\": \"$1\", \"rank\": 0${2:+, $2}}" >>"${PROGRAM_TRACE:-/dev/stdout}"; }
say start

mkdir -p results
last=$(ls results/step-*.txt 2>/dev/null | sort | tail -n 1)
item=0
sum=
if [ -n "$last" ]; then
    read -r item sum <"$last"
fi
say resumed "\"step\": $item, \"weights\": \"$sum\""
while [ "$item" -lt 100 ]; do
    say load
    sum=$( (echo "$sum"; seq "$item" 50000) | sha256sum | cut -c -16)
    item=$((item + 1))
    say step "\"step\": $item, \"ids\": [$((item - 1))], \"weights\": \"$sum\""
    if [ $((item % 10)) -eq 0 ]; then
        echo "$item $sum" >"results/$(printf 'step-%04d.txt' "$item")"
        say saved "\"step\": $item"
    fi
done
say finished "\"step\": $item"
