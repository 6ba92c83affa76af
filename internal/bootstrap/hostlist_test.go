package bootstrap

import (
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

func TestExpandHosts(t *testing.T) {
	for list, want := range map[string]string{
		"node":                      "node",
		"a,b,a":                     "a b a",
		"node[01-03,7],gpu-[1-2]-x": "node01 node02 node03 node7 gpu-1-x gpu-2-x",
		"n[8-11]":                   "n8 n9 n10 n11",
		"n[08-11]":                  "n08 n09 n10 n11",
		"n[098-101]":                "n098 n099 n100 n101",
		"n[3]":                      "n3",
		"n[0-0]":                    "n0",
		"r[1-2]n[1-2]":              "r1n1 r1n2 r2n1 r2n2",
		"[1-2][08-09]x,h":           "108x 109x 208x 209x h",
		"n[5,1,3]":                  "n5 n1 n3",
		"a.b-c_d[1].example":        "a.b-c_d1.example",
		"n[999999999999999999]":     "n999999999999999999",
	} {
		got, err := ExpandHosts(list)
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: got %q, %v, want %q", list, got, err, want)
		}
	}
}

func TestExpandHostsRefuses(t *testing.T) {
	long := strings.Repeat("n", maxNameBytes)
	for list, part := range map[string]string{
		"":                            "an empty name",
		"a,":                          "an empty name",
		",a":                          "an empty name",
		"a,,b":                        "an empty name",
		"n[":                          "without a closing bracket",
		"n[1,2":                       "without a closing bracket",
		"n]":                          "without an opening bracket",
		"n[1]]":                       "without an opening bracket",
		"n[[1]]":                      "nested brackets",
		"n[]":                         "want a number",
		"n[1,]":                       "want a number",
		"n[1-]":                       "want a number",
		"n[-1]":                       "want a number",
		"n[1-2-3]":                    "want a number",
		"n[a]":                        "want a number",
		"n[+1]":                       "want a number",
		"n[1 ]":                       "want a number",
		"n[1234567890123456789]":      "want a number",
		"n[3-1]":                      `"3-1" ends before its start`,
		"a b":                         `" ", which is not allowed in a name`,
		"a\x1b[1]":                    `"\x1b", which is not allowed in a name`,
		"n[0-65536]":                  "more than 65536 hosts",
		"n[0-65535],m":                "more than 65536 hosts",
		"m,n[0-65535]":                "more than 65536 hosts",
		"n[0-999999999999999999]":     "more than 65536 hosts",
		"n[0-255][0-255][0-1]":        "more than 65536 hosts",
		"n[0-299][0-299]":             "more than 65536 hosts",
		long + "n":                    "more than 255 bytes",
		long + "[1]":                  "more than 255 bytes",
		strings.Repeat("n,", 600_000): "want at most 1048576",
	} {
		got, err := ExpandHosts(list)
		if got != nil {
			t.Errorf("%s: got %d names", quote(list), len(got))
		}
		testnet.WantError(t, err, "host list", part)
	}
	for _, list := range []string{"n[0-65535]", "n[0-255][0-255]",
		strings.TrimSuffix(strings.Repeat("n,", MaxHosts), ",")} {
		if got, err := ExpandHosts(list); len(got) != MaxHosts || err != nil {
			t.Errorf("%s: got %d names, %v, want %d", quote(list), len(got), err, MaxHosts)
		}
	}
}

func TestExpandHostsTakesLittleMemoryForWhatItRefuses(t *testing.T) {
	for _, list := range []string{
		"n[0-999999999999999999]", "n[0-65535][0-65535]", "n" + strings.Repeat("[0-1]", 80), "[0-65535]" +
			strings.Repeat("[1]", 255),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, err := ExpandHosts(list); err == nil {
			t.Errorf("%s is expanded", list)
		}
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > 32<<20 {
			t.Errorf("%s: %d bytes allocated, want at most 32 MiB", list, got)
		}
	}
}

func FuzzExpandHosts(f *testing.F) {
	for _, list := range []string{"node[01-03,7],gpu-[1-2]-x", "r[1-2]n[1-2]", "a,b", "n[0-65535]", "n[1-",
		"[[]", "x[9-10]y[00-01]z"} {
		f.Add(list)
	}
	f.Fuzz(func(t *testing.T, list string) {
		hosts, err := ExpandHosts(list)
		if err != nil {
			if hosts != nil {
				t.Errorf("%q: names beside %v", list, err)
			}
			return
		}
		if len(hosts) == 0 || len(hosts) > MaxHosts {
			t.Fatalf("%q stands for %d hosts", list, len(hosts))
		}
		for _, h := range hosts {
			if h == "" || len(h) > maxNameBytes || strings.ContainsAny(h, "[], \n\x00") {
				t.Fatalf("%q gives the name %q", list, h)
			}
		}
		// A name without brackets expands to itself. So if the expanded names are joined to a list, this list
		// must expand to the same names.
		if plain := strings.Join(hosts, ","); len(plain) <= MaxListBytes {
			if again, err := ExpandHosts(plain); err != nil || !slices.Equal(again, hosts) {
				t.Fatalf("%q: %d names, written out %d, %v", list, len(hosts), len(again), err)
			}
		}
	})
}

func TestExpandTasks(t *testing.T) {
	for list, want := range map[string][]int{
		"1":          {1},
		"2(x3),1":    {2, 2, 2, 1},
		"1,2,3":      {1, 2, 3},
		"4(x1)":      {4},
		"16(x2),8,1": {16, 16, 8, 1},
	} {
		if got, err := ExpandTasks(list); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: got %v, %v, want %v", list, got, err, want)
		}
	}
	for list, part := range map[string]string{
		"":                            "want a number",
		"a":                           "want a number",
		"1,":                          "want a number",
		"-1":                          "want a number",
		"+1":                          "want a number",
		"1(x":                         "want a number",
		"1(x2":                        "want a number",
		"1(x2)3":                      "want a number",
		"1(2)":                        "want a number",
		"1(x-1)":                      "want a number",
		"99999999999999999999":        "want a number",
		"0":                           "at least 1 task",
		"1(x0)":                       "at least 1 host",
		"1(x65536),1":                 "more than 65536 hosts",
		"1(x65537)":                   "from 0 to 65536",
		strings.Repeat("1,", 600_000): "want at most 1048576",
	} {
		got, err := ExpandTasks(list)
		if got != nil {
			t.Errorf("%s: got %d numbers", quote(list), len(got))
		}
		testnet.WantError(t, err, "tasks per node", part)
	}
}

func FuzzExpandTasks(f *testing.F) {
	for _, list := range []string{"2(x3),1", "1", "1(x65536)", "0(x0)", "1(x"} {
		f.Add(list)
	}
	f.Fuzz(func(t *testing.T, list string) {
		tasks, err := ExpandTasks(list)
		if err != nil {
			return
		}
		var plain []string
		for _, n := range tasks {
			if n < 1 {
				t.Fatalf("%q gives %d", list, n)
			}
			plain = append(plain, strconv.Itoa(n))
		}
		if len(tasks) == 0 || len(tasks) > MaxHosts {
			t.Fatalf("%q stands for %d hosts", list, len(tasks))
		}
		if again, err := ExpandTasks(strings.Join(plain, ",")); err != nil || !slices.Equal(again, tasks) {
			t.Fatalf("%q: written out %v, want %v; %v", list, again, tasks, err)
		}
	})
}
