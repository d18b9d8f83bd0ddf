#!/usr/bin/env bash
# Run `nano ab` to compare the base with the working tree. Write the findings to the job's summary and to a comment. Later runs update
# this comment. The exit code is the exit code of `nano ab`: 1 for a regression, 2 for invalid input or if nothing was compared. action.yml sets the variables.
set -euo pipefail

findings=$(mktemp -d)
arguments=(ab "$NANO_BASE" . --threshold "$NANO_THRESHOLD" --budget "$NANO_BUDGET")
arguments+=(--markdown "$findings/table.md" --json "$findings/findings.json")
[ -z "$NANO_TOTAL" ] || arguments+=(--total "$NANO_TOTAL")
while read -r name; do
  [ -z "$name" ] || arguments+=(--call "$name")
done <<<"$NANO_CALL"
[ -z "$NANO_SETUP" ] || arguments+=(--setup "$NANO_SETUP")
if [[ "$NANO_BASE" =~ ^0+$ ]]; then
  echo "base: this push created the branch, so it has no earlier revision; set the input base" >&2
  exit 2
fi
if ! git rev-parse --verify --quiet "$NANO_BASE^{commit}" >/dev/null; then
  # A shallow checkout contains only the newest commit.
  git fetch --quiet --depth=1 origin "$NANO_BASE"
fi

code=0
nano "${arguments[@]}" || code=$?
[ -s "$findings/findings.json" ] || exit "$code"

heading=$(python3 - "$findings/findings.json" <<'END'
import json, sys

found = json.load(open(sys.argv[1]))
words = {"regressed": "Regression", "failed": "A case failed", "missing": "A case is missing"}
bad = [text for finding, text in words.items() if finding in found["counts"]]
print((bad + ["No regression" if found["compared"] else "Nothing was compared"])[0])
END
)

marker="<!-- nanolib -->"
{
  echo "$marker"
  echo "### $heading"
  echo
  cat "$findings/table.md"
  echo
  echo "\`nano ab\` measured both versions in turns. The threshold is $NANO_THRESHOLD."
} >"$findings/comment.md"
cat "$findings/comment.md" >>"${GITHUB_STEP_SUMMARY:-/dev/stdout}"
[ -z "${GITHUB_OUTPUT:-}" ] || echo "findings=$findings/findings.json" >>"$GITHUB_OUTPUT"

comment() {
  local comments="repos/$GITHUB_REPOSITORY/issues/$NANO_PULL_REQUEST/comments" ours place method=POST
  ours=$(gh api --paginate "$comments" --jq ".[] | select(.body | startswith(\"$marker\")) | .id") || return
  place=$comments
  [ -z "$ours" ] || method=PATCH place="repos/$GITHUB_REPOSITORY/issues/comments/${ours%%$'\n'*}"
  gh api --silent --method "$method" "$place" --field "body=@$findings/comment.md"
}
# If GitHub refuses the comment, the job still reports the findings.
[ -z "$NANO_PULL_REQUEST" ] || comment || echo "cannot write the comment; give the job the permission pull-requests: write" >&2
exit "$code"
