package config

import "strings"

// suggest returns the last part of an error message about an unknown name. This part suggests the known name
// that is passed to suggest. If name is empty, suggest returns "".
func suggest(name string) string {
	if name == "" {
		return ""
	}
	return "; did you mean " + name + "?"
}

// nearestName returns the known variable that is most similar to name, or "" if none is similar.
func nearestName(name string) string {
	var names []string
	for _, s := range settings {
		if s.Scope != ByLauncher || strings.HasPrefix(s.Name, "HOROVOD_") {
			names = append(names, s.Name)
		}
	}
	for _, i := range inerts {
		names = append(names, strings.TrimSuffix(i.Name, "*"))
	}
	return Nearest(name, names, "_")
}

// nearestKey returns the key of the settings file that is most similar to key, or "" if none is similar.
func nearestKey(key string) string { return Nearest(key, keys(), ".") }

// Nearest returns the candidate that a user who wrote name probably meant. It is the candidate that differs
// in the fewest letters. If several candidates do, it is the first of them. It returns "" if no candidate is
// similar. The part before the first separator counts as at most 2 different letters, because a user who
// writes HVD_ instead of HOROVOD_, or another section of the file, usually writes the rest correctly. If
// separator is empty, all letters count the same.
func Nearest(name string, candidates []string, separator string) string {
	head, tail := split(name, separator)
	best, least := "", max(2, len(tail)/3)+1
	for _, candidate := range candidates {
		h, t := split(candidate, separator)
		if d := distance(tail, t) + min(distance(head, h), 2); d < least {
			best, least = candidate, d
		}
	}
	return best
}

func split(name, separator string) (head, tail string) {
	if separator != "" {
		if head, tail, ok := strings.Cut(name, separator); ok {
			return head, tail
		}
	}
	return "", name
}

// distance returns the minimum number of changes that turn text a into text b, where a change inserts,
// deletes or replaces a letter, or swaps two neighbouring letters (optimal string alignment: Boytsov, 2011,
// §2.1). It ignores case and all but the first 64 letters. It takes time and memory proportional to the
// product of the lengths.
func distance(a, b string) int {
	a, b = strings.ToLower(a[:min(len(a), 64)]), strings.ToLower(b[:min(len(b), 64)])
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			replace := rows[i-1][j-1]
			if a[i-1] != b[j-1] {
				replace++
			}
			rows[i][j] = min(replace, rows[i-1][j]+1, rows[i][j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
