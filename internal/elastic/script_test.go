package elastic_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
)

var rewrite = flag.Bool("rewrite", false, "write what the scripts print into testdata")

// TestScripts runs the scripts testdata/*.txt. In a script, a line that begins with > is the output of the
// line before, so the test fails if the machine answers anything else. The other lines are events, as in
//
//	config start=4 min=2 max=4 timeout=600s cooldown=10s-1h by=host resets=3 hosts=fixed
//	discover h1:2 h2:2      the hosts and their slots
//	ready h1:0 h1:1         processes are ready; "ready all" means all that were started
//	synced                  all ranks of the newest roster have the state of the training
//	ended h1:0,h1:1 137 killed by SIGKILL
//	failed h1:0,h1:1 is silent
//	verdict 1 0 2,3 is silent    rank 0 of generation 1 has found that ranks 2 and 3 have failed
//	leave h2:1 preempted
//	leave-host h2 preempted
//	done all                the training has returned
//	again h1:0              another training begins in a process
//	wait 10s                time passes
//	late 10s                time passes without a tick, because the launcher was stopped
//	places                  prints the topology of the newest roster
//
// h1:0/2 is the second process at slot 0 of h1. Lines that begin with # are comments.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text := testnet.ReadFile(t, file)
			got := play(t, file, string(text))
			switch {
			case got == string(text):
			case *rewrite:
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			default:
				t.Fatalf("%s: got\n%s\nwant\n%s", file, got, text)
			}
		})
	}
}

// player runs a script.
type player struct {
	t       *testing.T
	where   string
	m       *elastic.Machine
	now     time.Time
	roster  *elastic.Roster
	started []elastic.Member
	out     strings.Builder
}

func play(t *testing.T, file, text string) string {
	p := &player{t: t, now: time.Unix(0, 0)}
	for i, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		p.where = fmt.Sprintf("%s:%d", file, i+1)
		if strings.HasPrefix(line, ">") {
			continue
		}
		p.out.WriteString(line + "\n")
		if line != "" && line[0] != '#' {
			p.event(strings.Fields(line))
		}
	}
	return p.out.String()
}

func (p *player) event(words []string) {
	rest := words[1:]
	switch words[0] {
	case "config":
		p.m = elastic.New(p.config(rest), p.now)
	case "discover":
		var hosts []elastic.Host
		for _, w := range rest {
			name, slots, _ := strings.Cut(w, ":")
			hosts = append(hosts, elastic.Host{Name: name, Slots: p.number(slots)})
		}
		p.print(p.m.Discovered(p.now, hosts))
	case "ready":
		for _, k := range p.members(rest, &p.started) {
			p.print(p.m.Ready(p.now, k))
		}
	case "synced":
		p.print(p.m.Synced(p.now, p.roster.Generation, time.Second))
	case "ended":
		var exits []elastic.Exit
		for _, k := range p.members(strings.Split(rest[0], ","), nil) {
			x := elastic.Exit{Member: k, Status: p.number(rest[1]), How: strings.Join(rest[2:], " ")}
			exits = append(exits, x)
		}
		p.print(p.m.Ended(p.now, exits...))
	case "failed":
		p.print(p.m.Failed(p.now, p.members(strings.Split(rest[0], ","), nil), strings.Join(rest[1:], " ")))
	case "verdict":
		var ranks []topo.Rank
		for _, r := range strings.Split(rest[2], ",") {
			ranks = append(ranks, topo.Rank(p.number(r)))
		}
		failed := p.m.Processes(uint64(p.number(rest[0])), topo.Rank(p.number(rest[1])), ranks, false)
		p.print(p.m.Failed(p.now, failed, strings.Join(rest[3:], " ")))
	case "leave":
		p.print(p.m.Leave(p.now, p.member(rest[0]), strings.Join(rest[1:], " ")))
	case "leave-host":
		p.print(p.m.LeaveHost(p.now, rest[0], strings.Join(rest[1:], " ")))
	case "done":
		for _, k := range p.members(rest, &p.roster.Members) {
			p.print(p.m.Done(p.now, k))
		}
	case "again":
		for _, k := range p.members(rest, &p.roster.Members) {
			p.print(p.m.Again(p.now, k))
		}
	case "wait":
		for end := p.now.Add(p.duration(rest[0])); p.now.Before(end); {
			last := p.now
			p.now = end
			if next := p.m.Next(); !next.IsZero() && next.Before(end) {
				p.now = next
			}
			if p.now.Before(last) { // after the event late
				p.now = last
			}
			p.print(p.m.Tick(p.now))
		}
	case "late":
		p.now = p.now.Add(p.duration(rest[0]))
	case "places":
		for i, at := range p.roster.Topology() {
			fmt.Fprintf(&p.out, "> %v: rank %d/%d local %d/%d cross %d/%d\n", p.roster.Members[i], at.Rank, at.Size,
				at.LocalRank, at.LocalSize, at.CrossRank, at.CrossSize)
		}
	default:
		p.t.Fatalf("%s: got the event %q", p.where, words[0])
	}
}

func (p *player) config(words []string) elastic.Config {
	c := elastic.Config{Start: 1, Min: 1, Timeout: 600 * time.Second, StartTimeout: 30 * time.Second,
		Settle: time.Second, ResetLimit: -1, Random: func() float64 { return 0.5 }}
	for _, w := range words {
		switch name, value, _ := strings.Cut(w, "="); name {
		case "start":
			c.Start = p.number(value)
		case "min":
			c.Min = p.number(value)
		case "max":
			c.Max = p.number(value)
		case "spares":
			c.Spares = p.number(value)
		case "resets":
			c.ResetLimit = p.number(value)
		case "timeout":
			c.Timeout = p.duration(value)
		case "notice":
			c.Notice = p.duration(value)
		case "answer":
			c.Answer = p.duration(value)
		case "by":
			c.ByHost = value == "host"
		case "hosts":
			c.Fixed = value == "fixed"
		case "cooldown":
			lo, hi, _ := strings.Cut(value, "-")
			c.Cooldown = [2]time.Duration{p.duration(lo), p.duration(hi)}
		default:
			p.t.Fatalf("%s: got the option %q", p.where, w)
		}
	}
	return c
}

func (p *player) number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		p.t.Fatalf("%s: %v", p.where, err)
	}
	return n
}

func (p *player) duration(text string) time.Duration {
	d, err := time.ParseDuration(text)
	if err != nil {
		p.t.Fatalf("%s: %v", p.where, err)
	}
	return d
}

func (p *player) member(text string) elastic.Member {
	slot, number, several := strings.Cut(text, "/")
	host, index, _ := strings.Cut(slot, ":")
	k := elastic.Member{Slot: elastic.Slot{Host: host, Index: p.number(index)}, Number: 1}
	if several {
		k.Number = p.number(number)
	}
	return k
}

// members parses processes. If words is "all", it returns those in all, and empties all.
func (p *player) members(words []string, all *[]elastic.Member) (members []elastic.Member) {
	if words[0] == "all" {
		members, *all = *all, nil
		return members
	}
	for _, w := range words {
		members = append(members, p.member(w))
	}
	return members
}

// print prints what the machine answers.
func (p *player) print(o elastic.Output) {
	line := func(what string, members []elastic.Member) {
		if len(members) > 0 {
			fmt.Fprintf(&p.out, "> %s%s\n", what, list(members))
		}
	}
	line("kill", o.Kill)
	if r := o.Publish; r != nil {
		how := ""
		if r.Change&elastic.Removed != 0 {
			how += " removed"
		}
		if r.Change&elastic.Added != 0 {
			how += " added"
		}
		if r.Lost {
			how += " lost"
		}
		fmt.Fprintf(&p.out, "> generation %d:%s;%s\n", r.Generation, list(r.Members), how)
		if r.Reason != "" {
			fmt.Fprintf(&p.out, ">   %s\n", r.Reason)
		}
		p.roster = &elastic.Roster{Generation: r.Generation, Members: slices.Clone(r.Members)}
	}
	line("start", o.Start)
	if s := o.Resume; s != nil {
		fmt.Fprintf(&p.out, "> generation %d trains after %v\n", s.Generation, s.Stopped)
	}
	p.started = append(p.started, o.Start...)
	for _, n := range o.Notes {
		fmt.Fprintf(&p.out, "> note: %s\n", n)
	}
	if e := o.End; e != nil {
		fmt.Fprintf(&p.out, "> end: %s", e.Reason)
		if e.Culprit != nil {
			fmt.Fprintf(&p.out, " (%v)", *e.Culprit)
		}
		fmt.Fprintln(&p.out)
	}
}

func list(members []elastic.Member) (text string) {
	for _, k := range members {
		text += " " + k.Slot.String()
		if k.Number > 1 {
			text += "/" + strconv.Itoa(k.Number)
		}
	}
	return text
}

// In a large job, each event of one rank takes little time, because after a failure all ranks report it and
// answer the new roster at once.
func TestManyRanks(t *testing.T) {
	const ranks = 4096

	begin, now := testnet.ProcessorTime(t), time.Unix(0, 0)
	m := elastic.New(elastic.Config{Start: ranks, Min: 1, Timeout: time.Hour, StartTimeout: time.Hour,
		Answer: time.Second, ResetLimit: -1}, now)
	var hosts []elastic.Host
	for i := range ranks / 8 {
		hosts = append(hosts, elastic.Host{Name: fmt.Sprintf("h%d", i), Slots: 8})
	}
	members := m.Discovered(now, hosts).Start
	all := func(event func(elastic.Member)) {
		for _, p := range members {
			if event(p); testnet.ProcessorTime(t)-begin > 100*time.Second {
				t.Fatalf("the events of %d ranks take more than 100 s of processor time", ranks)
			}
		}
	}
	all(func(p elastic.Member) { m.Ready(now, p) })
	m.Synced(now, 1, 0)
	dead := members[:1]
	if r := m.Failed(now, dead, "is silent").Publish; r == nil || len(r.Members) != ranks-1 {
		t.Fatalf("got the roster %+v, want %d ranks", r, ranks-1)
	}
	all(func(elastic.Member) { m.Failed(now, dead, "is silent") })
	all(func(p elastic.Member) { m.Ready(now, p) })
	all(func(p elastic.Member) { m.Done(now, p) })
	if m.Over() {
		t.Error("the job has ended before its processes")
	}
}

// A verdict about a generation that had not begun counts only until there is a later one.
func TestProcesses(t *testing.T) {
	now := time.Unix(0, 0)
	m := elastic.New(elastic.Config{Start: 2, Min: 1, Timeout: time.Hour,
		StartTimeout: time.Hour, ResetLimit: -1}, now)
	a := elastic.Member{Slot: elastic.Slot{Host: "h"}, Number: 1}
	b := elastic.Member{Slot: elastic.Slot{Host: "h", Index: 1}, Number: 1}
	m.Discovered(now, []elastic.Host{{Name: "h", Slots: 2}})
	m.Ready(now, a)
	m.Ready(now, b)
	both := []topo.Rank{0, 1, 7}
	for _, starting := range []bool{false, true} {
		if got := m.Processes(1, 1, both, starting); !slices.Equal(got, []elastic.Member{a, b}) {
			t.Errorf("starting %t: got %v, want both", starting, got)
		}
	}
	m.Failed(now, []elastic.Member{a}, "failed")
	if got := m.Processes(1, 1, both, false); !slices.Equal(got, []elastic.Member{a, b}) {
		t.Errorf("got %v, want both processes of the generation before", got)
	}
	if got := m.Processes(1, 1, both, true); got != nil {
		t.Errorf("got %v, want none", got)
	}
}
