package bootstrap

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// These are the limits of lists of hosts. MaxListBytes is the maximum length of the text of a list, MaxHosts
// the maximum number of names in a list, maxNameBytes the maximum length of a name, and maxTasks the maximum
// number of tasks on one host.
const (
	MaxListBytes = 1 << 20
	MaxHosts     = 1 << 16
	maxNameBytes = 255
	maxTasks     = 1 << 16
)

// ExpandHosts expands a host list of Slurm, such as "node[01-03,7],gpu-[1-2]-x". A list consists of names
// separated by commas. Brackets in a name hold numbers and ranges of numbers. The numbers of a range are
// padded with zeros to the width of its first number. If a name has several brackets, the numbers in the last
// one change fastest. The names are returned in the order of the list and may repeat.
//
// A list may have up to MaxListBytes bytes and expand to up to MaxHosts names of up to 255 bytes. If it
// exceeds a limit, ExpandHosts returns an error before it allocates memory for the names.
func ExpandHosts(list string) ([]string, error) {
	hosts, err := expandHosts(list)
	if err != nil {
		return nil, fmt.Errorf("host list %s: %w", quote(list), err)
	}
	return hosts, nil
}

func expandHosts(list string) (hosts []string, err error) {
	if len(list) > MaxListBytes {
		return nil, fmt.Errorf("got %d bytes, want at most %d", len(list), MaxListBytes)
	}
	for {
		var item string
		var more bool
		if item, list, more, err = cutHost(list); err != nil {
			return nil, err
		}
		names, err := expandHost(item, MaxHosts-len(hosts))
		if err != nil {
			return nil, err
		}
		hosts = append(hosts, names...)
		if !more {
			return hosts, nil
		}
	}
}

// cutHost splits list at the first comma outside of brackets. item is the text before the comma, and rest is
// the text after it. If there is no such comma, item is the whole list and more is false.
func cutHost(list string) (item, rest string, more bool, err error) {
	open := false
	for i, c := range []byte(list) {
		switch {
		case c == '[' && open:
			return "", "", false, errors.New("got nested brackets")
		case c == '[':
			open = true
		case c == ']' && !open:
			return "", "", false, errors.New("got a closing bracket without an opening bracket")
		case c == ']':
			open = false
		case c == ',' && !open:
			return list[:i], list[i+1:], true, nil
		}
	}
	if open {
		return "", "", false, errors.New("got an opening bracket without a closing bracket")
	}
	return list, "", false, nil
}

// expandHost expands one item of a list. The brackets of the item must match. If the item has more names than
// the limit most, expandHost returns an error.
func expandHost(item string, most int) ([]string, error) {
	if item == "" {
		return nil, errors.New("got an empty name")
	}
	// Each element of parts belongs to one bracket. It holds the alternatives of the bracket, each prefixed
	// with the literal text before the bracket. The names are built from parts only after their number and
	// length have been checked.
	var parts [][]string
	count, length := 1, 0
	for item != "" {
		literal, rest, bracket := strings.Cut(item, "[")
		if i := strings.IndexFunc(literal, notInNames); i >= 0 {
			return nil, fmt.Errorf("got %q, which is not allowed in a name", literal[i:i+1])
		}
		part := []string{literal}
		item = ""
		if bracket {
			var inside string
			var err error
			inside, item, _ = strings.Cut(rest, "]")
			if part, err = expandNumbers(inside, most); err != nil {
				return nil, err
			}
			for i, n := range part {
				part[i] = literal + n
			}
		}
		longest := 0
		for _, p := range part {
			longest = max(longest, len(p))
		}
		parts = append(parts, part)
		count *= len(part)
		length += longest
		if count > most {
			return nil, tooMany()
		}
		if length > maxNameBytes {
			return nil, fmt.Errorf("got a name of more than %d bytes", maxNameBytes)
		}
	}
	names := make([]string, count)
	for i := range names {
		at := make([]string, len(parts))
		for p, left := len(parts)-1, i; p >= 0; p-- {
			at[p] = parts[p][left%len(parts[p])]
			left /= len(parts[p])
		}
		names[i] = strings.Join(at, "")
	}
	return names, nil
}

func notInNames(c rune) bool {
	return !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
		strings.ContainsRune("-._", c))
}

func tooMany() error { return fmt.Errorf("got more than %d hosts", MaxHosts) }

// expandNumbers expands the text inside a bracket. If there are more numbers than the limit most, it returns
// an error.
func expandNumbers(inside string, most int) (numbers []string, err error) {
	for part := range strings.SplitSeq(inside, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		lo, err := hostNumber(first, part)
		if err != nil {
			return nil, err
		}
		hi, err := hostNumber(last, part)
		switch {
		case err != nil:
			return nil, err
		case hi < lo:
			return nil, fmt.Errorf("the range %q ends before its start", part)
		case hi-lo >= uint64(most-len(numbers)): // the range has hi-lo+1 numbers
			return nil, tooMany()
		}
		for n := lo; n <= hi; n++ {
			numbers = append(numbers, fmt.Sprintf("%0*d", len(first), n))
		}
	}
	return numbers, nil
}

// hostNumber parses the number s in a bracket. A number may have at most 18 digits, so that counting past it
// cannot overflow. part is the text for the error message.
func hostNumber(s, part string) (uint64, error) {
	if s == "" || len(s) > 18 || strings.Trim(s, "0123456789") != "" {
		return 0, fmt.Errorf("got %s in brackets, want a number or a range of numbers", quote(part))
	}
	return strconv.ParseUint(s, 10, 64)
}

// ExpandTasks expands Slurm's list of the number of tasks on each host of a step. For example, "2(x3),1"
// means 2 tasks on each of the first three hosts and 1 task on the fourth. If a list is for more than
// MaxHosts hosts, ExpandTasks returns an error.
func ExpandTasks(list string) ([]int, error) {
	tasks, err := expandTasks(list)
	if err != nil {
		return nil, fmt.Errorf("tasks per node %s: %w", quote(list), err)
	}
	return tasks, nil
}

func expandTasks(list string) (tasks []int, err error) {
	if len(list) > MaxListBytes {
		return nil, fmt.Errorf("got %d bytes, want at most %d", len(list), MaxListBytes)
	}
	for part := range strings.SplitSeq(list, ",") {
		number, times, repeated := strings.Cut(part, "(x")
		n, err := decimal(number, maxTasks)
		if err != nil {
			return nil, err
		}
		hosts := 1
		if repeated {
			inside, closed := strings.CutSuffix(times, ")")
			if !closed {
				return nil, fmt.Errorf("got %s, want a number as in 2 or 2(x3)", quote(part))
			}
			if hosts, err = decimal(inside, MaxHosts); err != nil {
				return nil, err
			}
		}
		if n == 0 || hosts == 0 {
			return nil, fmt.Errorf("got %s, want at least 1 task on at least 1 host", quote(part))
		}
		if hosts > MaxHosts-len(tasks) {
			return nil, tooMany()
		}
		tasks = append(tasks, slices.Repeat([]int{n}, hosts)...)
	}
	return tasks, nil
}

// decimal parses a number from 0 to the limit most. It accepts only digits.
func decimal(s string, most int) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || n > most || strings.Trim(s, "0123456789") != "" {
		return 0, fmt.Errorf("got %s, want a number from 0 to %d", quote(s), most)
	}
	return n, nil
}

// quote returns s in quotes for an error message. It cuts s off after 200 bytes, because s comes from another
// program and may be long.
func quote(s string) string {
	if len(s) > 200 {
		return strconv.Quote(s[:200]) + "..."
	}
	return strconv.Quote(s)
}
