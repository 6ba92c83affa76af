package topo

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// maxRuns is the maximum number of runs of consecutive ranks that FormatRanks lists.
const maxRuns = 10

// FormatRanks formats ranks for reports and errors, as "rank 3", "ranks 0 and 1" or "ranks 0-2, 5 and 7". The
// ranks must be in ascending order. If there are more than 10 runs of consecutive ranks, the text lists only
// 10 and ends with the number of the other ranks, as "and 7 more".
func FormatRanks[R ~int | ~int32](ranks []R) string { return FormatRuns("rank", ranks) }

// FormatRuns formats numbers of things such as cores as FormatRanks formats ranks. noun is the word for one.
func FormatRuns[R ~int | ~int32](noun string, numbers []R) string {
	var runs []string
	rest := numbers
	for len(rest) > 0 && len(runs) < maxRuns {
		n := 1
		for n < len(rest) && rest[n] == rest[n-1]+1 {
			n++
		}
		run := strconv.Itoa(int(rest[0]))
		if n > 2 {
			run += "-" + strconv.Itoa(int(rest[n-1]))
		} else {
			n = 1 // two consecutive ranks are listed separately
		}
		runs, rest = append(runs, run), rest[n:]
	}
	if len(rest) > 0 {
		runs = append(runs, fmt.Sprintf("%d more", len(rest)))
	}
	last := len(runs) - 1
	switch {
	case len(numbers) == 0:
		return "no " + noun + "s"
	case len(numbers) == 1:
		return noun + " " + runs[0]
	case last == 0:
		return noun + "s " + runs[0]
	}
	return noun + "s " + strings.Join(runs[:last], ", ") + " and " + runs[last]
}

// maxReasons is the maximum number of different reasons that FormatReasons lists.
const maxReasons = 3

// FormatReasons formats why ranks have failed, as "ranks 0-2: no memory; rank 5: no descriptor". reasons[i]
// is the reason of ranks[i], and between stands between ranks and reason. The ranks must be in ascending
// order. If there are more than 3 different reasons, the text lists only the first 3, and the other ranks.
func FormatReasons[R ~int | ~int32](ranks []R, between string, reasons []string) string {
	var order []string
	with := make(map[string][]R)
	for i, r := range ranks {
		if with[reasons[i]] == nil {
			order = append(order, reasons[i])
		}
		with[reasons[i]] = append(with[reasons[i]], r)
	}
	var clauses []string
	for _, reason := range order[:min(len(order), maxReasons)] {
		clauses = append(clauses, FormatRanks(with[reason])+between+reason)
	}
	if len(order) > maxReasons {
		var others []R
		for i, r := range ranks {
			if slices.Contains(order[maxReasons:], reasons[i]) {
				others = append(others, r)
			}
		}
		clauses = append(clauses, FormatRanks(others)+" for other reasons")
	}
	return strings.Join(clauses, "; ")
}
