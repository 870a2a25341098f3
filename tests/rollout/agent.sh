#!/bin/sh
# An agent as a shell script: curl for the tasks that ask for it, else the clients of agent_clients.py.
# Usage: sh agent.sh PYTHON, with the task on stdin.
task=$(cat)
case $task in
*'"client": "curl"'*) ;;
*)
    printf '%s' "$task" | "$1" tests/rollout/agent_clients.py
    exit
    ;;
esac
answer=$(curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
    -d '{"model": "policy", "messages": [{"role": "user", "content": "hops 2 from 7"}]}') || exit 1
echo "$answer"
echo "{\"reward\": 0.$((${#answer} % 10)), \"metrics\": {\"curl\": 1}}"
