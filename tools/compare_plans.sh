#!/usr/bin/env bash
# Print, as Markdown, how the plans that changed since a commit differ in memory, time and traffic.
#
#     tools/compare_plans.sh COMMIT [PATHSPEC...]
#
# Run in the repository that has the plans. Exit code 1 if a plan has a problem. Code that plans name
# is not run, as in all of meshplan, unless somebody has trusted it on this machine.
set -euo pipefail
base=$1
shift
[ $# -gt 0 ] || set -- ':(glob)**/plan*.yaml' ':(glob)**/plans/*.yaml'
meshplan=${MESHPLAN:-meshplan}

# Plans name files relative to their folder, so the old ones need the whole old tree.
old=$(mktemp -d)
trap 'git worktree remove --force "$old/tree" && rm -rf "$old"' EXIT
git worktree add --quiet --detach "$old/tree" "$base"

fenced() {
    printf '```text\n%s\n```\n\n' "$1"
}

declare -A seen=()
status=0
while IFS= read -r -d '' plan; do
    plan=${plan%.lock.yaml}
    plan=${plan%.yaml}.yaml # If only its lock has changed.
    [ -e "$plan" ] && [ -z "${seen[$plan]:-}" ] || continue
    seen[$plan]=yes
    printf '### `%s`\n' "$plan"
    if ! answer=$($meshplan check -q -f "$plan" 2>&1); then
        fenced "$answer"
        status=1
    elif [ -e "$old/tree/$plan" ]; then
        # Both are named alike, without the folder of the old tree.
        answer=$($meshplan diff -q "$old/tree/$plan" "$plan" 2>&1) || [ $? -eq 1 ] || status=1
        fenced "${answer//"$old/tree/"/before: }"
    else
        answer=$($meshplan estimate -q -f "$plan" 2>&1) || [ $? -eq 1 ] || status=1
        fenced "$answer"
    fi
done < <(git diff --name-only -z --diff-filter=AMRD "$base" HEAD -- "$@")
[ ${#seen[@]} -gt 0 ] || echo 'No plan has changed.'
exit "$status"
