package controller_test

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

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
)

var rewrite = flag.Bool("rewrite", false, "write what the scripts print into testdata")

// TestScripts runs the scripts testdata/*.txt and compares their output with the expected output in the same
// files. testdata/README.md describes the notation.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text := testnet.ReadFile(t, file)
			got := play(t, file, string(text))
			if *rewrite {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			wantLines, gotLines := strings.Split(string(text), "\n"), strings.Split(got, "\n")
			for i := range max(len(wantLines), len(gotLines)) {
				var w, g string
				if i < len(wantLines) {
					w = wantLines[i]
				}
				if i < len(gotLines) {
					g = gotLines[i]
				}
				if w != g {
					t.Fatalf("%s:%d: got\n\t%s\nwant\n\t%s\nall of it:\n%s", file, i+1, g, w, got)
				}
			}
		})
	}
}

// TestLateVoteIsAsSpecified checks that testdata/late_vote.txt contains the frames of the example in
// docs/negotiation.md. Without this test, a run with -rewrite could change these frames unnoticed.
func TestLateVoteIsAsSpecified(t *testing.T) {
	text := testnet.ReadFile(t, "testdata/late_vote.txt")
	rest := string(text)
	for _, want := range []string{
		"\nsubmit rank=0,1,2 allreduce g1 float32[4]\n",
		"\n0->* down n=2 set=0 grant allreduce g1 tcp/ring erase=0 put g1=0\n",
		"\nsubmit rank=2 allreduce g0 float32[4]\n",
		"\n2->0 up seen=1 set=0 hits=1\n",
		"\nsubmit rank=0,1 allreduce g0 float32[4]\n",
		"\n0->* down n=3 set=0 grant allreduce g0 tcp/ring erase=0 put g0=0\n",
	} {
		at := strings.Index(rest, want)
		if at < 0 {
			t.Fatalf("testdata/late_vote.txt lacks, in this order, %q", want)
		}
		rest = rest[at+len(want)-1:]
	}
}

// script executes blocks of commands on a cluster and prints the events that result.
type script struct {
	t      *testing.T
	c      *cluster
	out    *strings.Builder
	events []event // the events of the current round

	manual bool        // whether grants finish only when the script contains the command done
	beats  bool        // whether heartbeats are printed
	deaf   []topo.Rank // the ranks to which frames do not arrive
	mute   []topo.Rank // the ranks whose frames do not arrive
	frozen []topo.Rank // the ranks that execute no turns
}

// An event is something that has happened at a rank. If it happens at several ranks in the same round, it is
// printed as one line.
type event struct {
	rank topo.Rank
	text string
}

// play runs a script and returns its text. In the text, the output of this run replaces the old output.
func play(t *testing.T, file, text string) string {
	var all strings.Builder
	s := &script{t: t}
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i := 0; i < len(lines); i++ {
		all.WriteString(lines[i] + "\n")
		line := strings.TrimSpace(lines[i])
		if line != "----" {
			if line != "" && !strings.HasPrefix(line, "#") {
				if err := s.command(line); err != nil {
					t.Fatalf("%s:%d: %v", file, i+1, err)
				}
			}
			continue
		}
		for i+1 < len(lines) && lines[i+1] != "" {
			i++ // skip the output in the file
		}
		s.settle()
		out := s.out.String()
		s.out.Reset()
		if out == "" {
			out = "quiet\n"
		}
		all.WriteString(out)
	}
	if s.out != nil && s.out.Len() > 0 {
		t.Fatalf("%s: output after the last block: %s", file, s.out.String())
	}
	return all.String()
}

// command executes one line of the script. The resulting frames are transferred later, at the end of the
// block.
func (s *script) command(line string) error {
	line, _, _ = strings.Cut(line, " #")
	f := fields(line)
	if f[0] == "cluster" {
		return s.cluster(f[1:])
	}
	if s.c == nil {
		return fmt.Errorf("%q before a cluster", line)
	}
	if f[0] == "tick" {
		d, err := time.ParseDuration(f[1])
		if err != nil {
			return err
		}
		s.tick(d)
		return nil
	}
	if f[0] == "tune" {
		t, err := s.c.parseTuning(f[1:])
		if err != nil {
			return err
		}
		s.c.tune(t)
		return nil
	}
	if f[0] == "digest" {
		s.digest()
		return nil
	}
	if strings.HasSuffix(f[0], "->0") {
		r, err := strconv.Atoi(strings.TrimSuffix(f[0], "->0"))
		if err != nil {
			return err
		}
		u, err := parseUp(f[1:])
		if err != nil {
			return err
		}
		return s.forge(topo.Rank(r), u)
	}
	if len(f) < 2 {
		return fmt.Errorf("%q lacks rank=", line)
	}
	ranks, err := s.ranks(f[1])
	if err != nil {
		return err
	}
	rest := f[2:]
	set := topo.Global
	if len(rest) > 0 && strings.HasPrefix(rest[0], "set=") {
		n, err := strconv.Atoi(rest[0][len("set="):])
		if err != nil {
			return err
		}
		set, rest = topo.ProcessSetID(n), rest[1:]
	}
	switch f[0] {
	case "submit":
		qs, rest, err := parseRequests(rest)
		if err != nil {
			return err
		}
		if len(rest) > 0 {
			return fmt.Errorf("unknown words at the end of the line: %q", rest)
		}
		for _, r := range ranks {
			for _, q := range qs {
				if s.c.nodes[r].waits(set, q.Name) {
					return fmt.Errorf("rank %d waits for %q already", r, q.Name)
				}
				if err := s.c.nodes[r].trySubmit(set, q); err != nil {
					s.event(s.c.nodes[r], "refused: %v", err)
				}
			}
		}
		return nil
	case "done":
		n := 1
		if len(rest) > 0 {
			if n, err = strconv.Atoi(strings.TrimPrefix(rest[0], "n=")); err != nil {
				return err
			}
		}
		for _, r := range ranks {
			node := s.c.nodes[r]
			for range n {
				i := slices.IndexFunc(node.lanes, func(l lane) bool { return len(l) > 0 })
				if i < 0 {
					return fmt.Errorf("rank %d has nothing to finish", r)
				}
				node.finish(i)
			}
		}
		return nil
	}
	for _, r := range ranks {
		switch f[0] {
		case "hold":
			s.deaf = append(s.deaf, r)
		case "hold-up":
			s.mute = append(s.mute, r)
		case "release":
			s.deaf = slices.DeleteFunc(s.deaf, func(x topo.Rank) bool { return x == r })
			s.mute = slices.DeleteFunc(s.mute, func(x topo.Rank) bool { return x == r })
		case "freeze":
			s.frozen = append(s.frozen, r)
		case "shutdown":
			s.c.nodes[r].m.Tick(s.c.now)
			s.c.nodes[r].m.Shutdown("", nil)
		case "expire":
			var waited time.Duration
			if len(rest) > 0 {
				if waited, err = time.ParseDuration(rest[0]); err != nil {
					return err
				}
			}
			s.c.nodes[r].m.Tick(s.c.now)
			s.c.nodes[r].m.ExpireShutdown(waited)
		case "timeout":
			d, err := time.ParseDuration(rest[1])
			if err != nil {
				return err
			}
			s.c.nodes[r].m.Tick(s.c.now)
			if len(rest) == 2 {
				s.c.nodes[r].m.Timeout(set, rest[0], d)
				continue
			}
			of, err := strconv.Atoi(strings.TrimPrefix(rest[2], "of="))
			if err != nil {
				return err
			}
			s.c.nodes[r].m.TimeoutOfMessage(set, rest[0], topo.Rank(of), d)
		case "suspect":
			var suspects []topo.Rank
			for _, text := range strings.Split(strings.TrimPrefix(rest[0], "of="), ",") {
				of, err := strconv.Atoi(text)
				if err != nil {
					return err
				}
				suspects = append(suspects, topo.Rank(of))
			}
			s.c.nodes[r].m.Tick(s.c.now)
			s.c.nodes[r].m.Suspect(suspects, strings.Join(rest[1:], " "))
		case "kill":
			s.round() // frames that were sent before the death must still arrive
			s.c.kill(r, "connection reset")
		default:
			return fmt.Errorf("unknown command %q", f[0])
		}
	}
	return nil
}

func (s *script) ranks(text string) ([]topo.Rank, error) {
	list, ok := strings.CutPrefix(text, "rank=")
	if !ok {
		return nil, fmt.Errorf("want rank=, got %q", text)
	}
	if list == "*" {
		return s.c.cfg.Sets[0].Ranks, nil
	}
	return parseRanks(list, len(s.c.nodes))
}

func parseRanks(list string, size int) ([]topo.Rank, error) {
	var ranks []topo.Rank
	for text := range strings.SplitSeq(list, ",") {
		r, err := strconv.Atoi(text)
		if err != nil || r < 0 || r >= size {
			return nil, fmt.Errorf("rank %q of %d", text, size)
		}
		ranks = append(ranks, topo.Rank(r))
	}
	return ranks, nil
}

// cluster starts a new job with options such as "size=3 cache=4 fusion=64KiB cycle=5ms sets=1:1,2;2:0,2
// refuse=uint8 manual heartbeats".
func (s *script) cluster(f []string) error {
	*s = script{t: s.t, out: new(strings.Builder)}
	cfg := controller.CoordinatorConfig{LivenessTimeout: livenessTimeout, CacheCapacity: 4,
		FusionThresholdBytes: 64 << 10}
	var refused []tensor.DType
	for _, option := range f {
		key, value, _ := strings.Cut(option, "=")
		var err error
		switch key {
		case "size":
			var size int
			size, err = strconv.Atoi(value)
			cfg.Sets = append(cfg.Sets, controller.Global(size))
		case "cache":
			cfg.CacheCapacity, err = strconv.Atoi(value)
		case "fusion":
			unit := int64(1)
			if kib, ok := strings.CutSuffix(value, "KiB"); ok {
				value, unit = kib, 1<<10
			}
			cfg.FusionThresholdBytes, err = strconv.ParseInt(strings.TrimSuffix(value, "B"), 10, 64)
			cfg.FusionThresholdBytes *= unit
		case "cycle":
			cfg.CycleTime, err = time.ParseDuration(value)
		case "warn":
			cfg.StallWarning, err = time.ParseDuration(value)
		case "shutdown":
			cfg.StallShutdown, err = time.ParseDuration(value)
		case "groups-apart":
			cfg.DisableGroupFusion = true
		case "deterministic":
			cfg.Deterministic = true
		case "leaders":
			cfg.Leaders, err = parseRanks(value, len(cfg.Sets[0].Ranks))
		case "sets":
			for text := range strings.SplitSeq(value, ";") {
				id, members, _ := strings.Cut(text, ":")
				var set controller.Set
				var n int
				if n, err = strconv.Atoi(id); err != nil {
					break
				}
				set.ID = topo.ProcessSetID(n)
				if set.Ranks, err = parseRanks(members, len(cfg.Sets[0].Ranks)); err != nil {
					break
				}
				cfg.Sets = append(cfg.Sets, set)
			}
		case "refuse":
			refused = append(refused, parseDType(value))
		case "manual":
			s.manual = true
		case "heartbeats":
			s.beats = true
		default:
			err = fmt.Errorf("unknown option %q", option)
		}
		if err != nil {
			return err
		}
	}
	cfg.Plan = plan(refused...)
	s.c = newCluster(s.t, cfg, s)
	return nil
}

func (s *script) awake(n *node) bool { return !n.over && !slices.Contains(s.frozen, n.rank) }

// settle executes rounds until no frame is in flight.
func (s *script) settle() {
	for range 1000 {
		if !s.round() {
			return
		}
	}
	s.t.Fatalf("frames still move after 1000 rounds; so far\n%s", s.out.String())
}

// round executes a turn of every rank, a turn of the coordinator, and another turn of every rank, in which
// the ranks read frames. It reports whether anything has happened.
func (s *script) round() bool {
	moved := false
	for _, n := range s.c.nodes {
		if s.awake(n) {
			n.send()
		}
	}
	for _, n := range s.c.nodes {
		if n.comb != nil && s.awake(n) {
			moved = n.combine(all) || moved
		}
	}
	s.flush()
	if zero := s.c.nodes[0]; !zero.dead && !slices.Contains(s.frozen, zero.rank) {
		s.c.coord.Tick(s.c.now)
		for _, n := range s.c.nodes {
			for n.arriving() && !slices.Contains(s.mute, n.rank) {
				s.c.receive(n)
				moved = true
			}
		}
		if s.c.decide() {
			moved = true
		}
	}
	for _, n := range s.c.nodes {
		for ; n.comb != nil && s.awake(n) && len(n.downs) > 0; moved = true {
			n.distribute()
		}
	}
	for _, n := range s.c.nodes {
		for s.awake(n) && len(n.down) > 0 && !slices.Contains(s.deaf, n.rank) {
			n.read()
			moved = true
		}
	}
	if !s.manual {
		for _, n := range s.c.nodes {
			for i := range n.lanes {
				for s.awake(n) && len(n.lanes[i]) > 0 {
					n.finish(i)
					moved = true
				}
			}
		}
	}
	s.flush()
	return moved
}

// tick advances the time by d. In this time, the ranks and the coordinator run turns at the times that Next
// returns.
func (s *script) tick(d time.Duration) {
	s.settle()
	end := s.c.now + d
	for {
		next := s.c.next(func(n *node) bool { return !slices.Contains(s.frozen, n.rank) })
		if next <= s.c.now {
			s.t.Fatalf("at %v the next turn is due at %v and changes nothing", s.c.now, next)
		}
		if next > end {
			break
		}
		s.c.now = next
		before := s.out.Len()
		s.settle()
		if text := s.out.String()[before:]; text != "" {
			kept := s.out.String()[:before]
			s.out.Reset()
			fmt.Fprintf(s.out, "%sat %v\n%s", kept, s.c.now, text)
		}
	}
	s.c.now = end
}

// digest compares the cache of each rank with the cache of the coordinator, for every set.
func (s *script) digest() {
	s.settle()
	for _, set := range s.c.cfg.Sets {
		want := s.c.coord.Digest(set.ID)
		var same, other []topo.Rank
		for _, r := range set.Ranks {
			if s.c.nodes[r].m.Digest(set.ID) == want {
				same = append(same, r)
			} else {
				other = append(other, r)
			}
		}
		fmt.Fprintf(s.out, "digest set=%d", set.ID)
		if len(same) > 0 {
			fmt.Fprintf(s.out, " equal=%s", ranksText(same, len(set.Ranks)))
		}
		if len(other) > 0 {
			fmt.Fprintf(s.out, " differs=%s", ranksText(other, len(set.Ranks)))
		}
		s.out.WriteByte('\n')
	}
}

// forge sends a frame on the connection of rank r. The rank's Member has not created this frame.
func (s *script) forge(r topo.Rank, u *message.Up) error {
	s.settle()
	frame, err := message.AppendUp(nil, u)
	if err != nil {
		return err
	}
	s.c.nodes[r].up = append(s.c.nodes[r].up, frame)
	fmt.Fprintf(s.out, "%s\n", upText(r, u))
	return nil
}

// flush prints the events of the round, ordered by the first rank of each event. Equal events are printed as
// one line.
func (s *script) flush() {
	for len(s.events) > 0 {
		text := s.events[0].text
		var ranks []topo.Rank
		s.events = slices.DeleteFunc(s.events, func(e event) bool {
			// If an event happens twice at a rank, the second one gets a line of its own.
			if e.text != text || slices.Contains(ranks, e.rank) {
				return false
			}
			ranks = append(ranks, e.rank)
			return true
		})
		fmt.Fprintf(s.out, "  %s: %s\n", ranksText(ranks, len(s.c.nodes)), text)
	}
}

func (s *script) event(n *node, format string, args ...any) {
	s.events = append(s.events, event{n.rank, fmt.Sprintf(format, args...)})
}

func (s *script) happened(e controller.Event) {
	s.flush()
	fmt.Fprintf(s.out, "stall: %v\n", e.Stall)
}

func (s *script) removed(n *node, set topo.ProcessSetID, unanswered []request) {
	s.event(n, "set %d is removed%s", set, namesText("; failed: ", unanswered))
}

func (s *script) submitted(*node, request)           {}
func (s *script) arrived(*node, *message.Up)         {}
func (s *script) relayed(*message.Part, *message.Up) {}
func (s *script) applied(*node, *message.Down)       {}
func (s *script) finished(*node, *controller.Grant)  {}
func (s *script) frameReceived()                     {}

func (s *script) sent(n *node, u *message.Up) {
	if u.Type != message.UpHeartbeat || s.beats {
		s.flush()
		fmt.Fprintf(s.out, "%s\n", upText(n.rank, u))
	}
}

func (s *script) issued(outs []controller.Outgoing) {
	for _, o := range outs {
		if o.Down.Type != message.DownHeartbeat || s.beats {
			s.flush()
			fmt.Fprintf(s.out, "%s\n", downText(o.To, len(s.c.nodes), o.Down))
		}
	}
}

func (s *script) granted(n *node, g *controller.Grant) {
	var names []string
	verb := "run"
	for _, r := range g.Responses {
		if names = append(names, r.Name); r.Kind == message.Error {
			verb = "fail"
		}
		if n.asked(g, r) < 0 {
			verb = "run unasked"
		}
	}
	if slices.Contains(g.Absent, n.rank) {
		verb = "run for others"
	}
	s.event(n, "%s %s", verb, strings.Join(names, "+"))
}

func (s *script) stop(n *node, reason string, unanswered []request) {
	if reason != "" {
		reason = " (" + reason + ")"
	}
	s.event(n, "stop%s%s", reason, namesText("; shut down: ", unanswered))
}

func (s *script) closed(n *node) { s.event(n, "close") }

func (s *script) failed(n *node, v *controller.Verdict) {
	left := n.pending
	for _, l := range n.lanes {
		for _, g := range l {
			for _, r := range g.Responses {
				left = append(left, request{set: g.Set, q: message.Request{Name: r.Name}})
			}
		}
	}
	s.event(n, "end: %v%s", v, namesText("; failed: ", left))
}

func namesText(label string, rs []request) string {
	if len(rs) == 0 {
		return ""
	}
	var names []string
	for _, r := range rs {
		names = append(names, r.q.Name)
	}
	slices.Sort(names)
	return label + strings.Join(names, ", ")
}
