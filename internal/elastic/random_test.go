package elastic_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/elastic"
)

var rounds = flag.Int("rounds", 2000, "random jobs to check")

// TestRandomJobs plays random jobs and checks after each event what must always hold.
func TestRandomJobs(t *testing.T) {
	for seed := range uint64(*rounds) {
		j := newRandomJob(seed)
		for range 60 {
			event := j.step()
			if err := j.check(); err != nil {
				t.Fatalf("seed %d: %s: %v\nall events:\n%s", seed, event, err, j.log)
			}
		}
	}
}

// randomJob is a model of a launcher whose processes do something random.
type randomJob struct {
	*rand.Rand
	cfg    elastic.Config
	m      *elastic.Machine
	now    time.Time
	hosts  []elastic.Host
	living []elastic.Member // in the order of their start
	ready  map[elastic.Member]bool
	failed map[elastic.Member]bool // named in a verdict, or killed by the machine
	gone   map[elastic.Member]bool
	all    map[elastic.Member]bool
	ranked map[elastic.Member]bool // in some roster
	roster *elastic.Roster
	before *elastic.Roster // the roster before, if the last event has made a new one
	out    elastic.Output
	synced map[elastic.Member]bool
	ended  bool
	done   bool
	log    string
}

func newRandomJob(seed uint64) *randomJob {
	r := rand.New(rand.NewPCG(seed, 0))
	j := &randomJob{Rand: r, now: time.Unix(0, 0), ready: make(map[elastic.Member]bool),
		failed: make(map[elastic.Member]bool), gone: make(map[elastic.Member]bool),
		all: make(map[elastic.Member]bool), ranked: make(map[elastic.Member]bool),
		synced: make(map[elastic.Member]bool)}
	j.cfg = elastic.Config{Min: 1 + r.IntN(3), Timeout: time.Minute, StartTimeout: 10 * time.Second,
		Settle: time.Second, Notice: time.Duration(r.IntN(3)) * 3 * time.Second,
		Answer:     time.Duration(r.IntN(3)) * 3 * time.Second,
		ResetLimit: -1, ByHost: r.IntN(4) == 0, Random: r.Float64}
	j.cfg.Start = j.cfg.Min + r.IntN(3)
	if r.IntN(2) == 0 {
		j.cfg.Max, j.cfg.Spares = j.cfg.Start+r.IntN(3), r.IntN(3)
	}
	if r.IntN(3) > 0 {
		j.cfg.Cooldown = [2]time.Duration{time.Second, time.Minute}
	}
	j.m = elastic.New(j.cfg, j.now)
	return j
}

// step makes a random event, and returns a text about it.
func (j *randomJob) step() (event string) {
	j.now = j.now.Add(time.Duration(j.IntN(3000)) * time.Millisecond)
	var p elastic.Member
	kind := j.IntN(14)
	if len(j.living) > 0 {
		p = j.living[j.IntN(len(j.living))]
	} else if kind > 3 {
		kind = 0
	}
	switch kind {
	case 0, 1:
		j.hosts = nil
		for i := range 3 {
			if n := j.IntN(4); n > 0 {
				j.hosts = append(j.hosts, elastic.Host{Name: fmt.Sprintf("h%d", i), Slots: n})
			}
		}
		event, j.out = fmt.Sprintf("discovered %v", j.hosts), j.m.Discovered(j.now, j.hosts)
	case 2, 3:
		event, j.out = "tick", j.m.Tick(j.now)
	case 4:
		status := j.IntN(2)
		event = fmt.Sprintf("%v ended with %d", p, status)
		exits := []elastic.Exit{{Member: p, Status: status, How: "ended"}}
		if q := j.living[j.IntN(len(j.living))]; q != p && j.IntN(3) == 0 {
			event += fmt.Sprintf(", with %v", q)
			exits = append(exits, elastic.Exit{Member: q, Status: status, How: "ended"})
			j.end(q)
		}
		j.end(p)
		j.out = j.m.Ended(j.now, exits...)
	case 5:
		event, j.failed[p] = fmt.Sprintf("%v failed", p), true
		j.out = j.m.Failed(j.now, []elastic.Member{p}, "failed")
	case 6:
		event, j.out = fmt.Sprintf("%v leaves", p), j.m.Leave(j.now, p, "notice")
	case 7:
		if j.roster == nil || j.IntN(4) > 0 {
			return j.step()
		}
		if j.IntN(3) == 0 {
			event, j.out = fmt.Sprintf("%v trains again", p), j.m.Again(j.now, p)
			break
		}
		j.done = j.done || j.ranked[p] && !j.failed[p]
		event, j.out = fmt.Sprintf("%v is done", p), j.m.Done(j.now, p)
	case 8, 9:
		if j.roster == nil || slices.ContainsFunc(j.roster.Members, func(p elastic.Member) bool {
			return j.failed[p] || j.gone[p]
		}) {
			return j.step()
		}
		for _, p := range j.roster.Members {
			j.synced[p] = true
		}
		event, j.out = "synced", j.m.Synced(j.now, j.roster.Generation, 0)
	default:
		event, j.ready[p] = fmt.Sprintf("%v is ready", p), true
		j.out = j.m.Ready(j.now, p)
	}
	j.log += fmt.Sprintf("%s: %+v\n", event, j.out)
	return event
}

func (j *randomJob) end(p elastic.Member) {
	j.living = slices.DeleteFunc(j.living, func(k elastic.Member) bool { return k == p })
	j.gone[p] = true
}

// check returns an error if the output is wrong.
func (j *randomJob) check() error {
	o := j.out
	if j.ended && (o.End != nil || o.Publish != nil || len(o.Start)+len(o.Kill)+len(o.Notes) > 0) {
		return fmt.Errorf("got an output after the end")
	}
	j.ended = j.ended || o.End != nil
	if o.End != nil && (o.Publish != nil || len(o.Start) > 0) {
		return fmt.Errorf("got an end and something else to do")
	}
	if next := j.m.Next(); !next.IsZero() && !next.After(j.now) {
		return fmt.Errorf("next tick at %v, which is not after %v", next, j.now)
	}
	for _, p := range o.Kill {
		if !slices.Contains(j.living, p) {
			return fmt.Errorf("kills %v, which does not live", p)
		}
		j.failed[p] = true
	}
	if err := j.checkRoster(o.Publish); err != nil {
		return err
	}
	for _, p := range o.Start {
		switch {
		case j.all[p]:
			return fmt.Errorf("starts %v twice", p)
		case j.done:
			return fmt.Errorf("starts %v although the training has returned", p)
		case slices.ContainsFunc(j.living, func(k elastic.Member) bool { return k.Slot == p.Slot }):
			return fmt.Errorf("starts %v in a slot in which a process lives", p)
		case !j.offers(p.Slot):
			return fmt.Errorf("starts %v in a slot that is not offered", p)
		}
		j.all[p] = true
		j.living = append(j.living, p)
	}
	return nil
}

func (j *randomJob) offers(s elastic.Slot) bool {
	return slices.ContainsFunc(j.hosts, func(h elastic.Host) bool {
		return h.Name == s.Host && s.Index < h.Slots
	})
}

func (j *randomJob) checkRoster(r *elastic.Roster) error {
	if r == nil {
		return nil
	}
	j.before, j.roster = j.roster, r
	want := uint64(1)
	var old []elastic.Member
	if j.before != nil {
		want, old = j.before.Generation+1, j.before.Members
		if slices.Equal(old, r.Members) {
			return fmt.Errorf("a new roster with the same members")
		}
	}
	if r.Generation != want {
		return fmt.Errorf("got generation %d, want %d", r.Generation, want)
	}
	if n := len(r.Members); n == 0 || n < j.cfg.Min && !j.done || j.cfg.Max > 0 && n > j.cfg.Max {
		return fmt.Errorf("got %d ranks, want %d to %d", n, j.cfg.Min, j.cfg.Max)
	}
	last := -1
	for i, p := range r.Members {
		j.ranked[p] = true
		at := slices.Index(old, p)
		switch {
		case at >= 0 && at < last:
			return fmt.Errorf("the ranks %v and %v have changed their order", r.Members[i-1], p)
		case at >= 0 && last == len(old):
			return fmt.Errorf("%v has a rank after a new process", p)
		case at < 0 && !j.ready[p]:
			return fmt.Errorf("%v is not ready", p)
		case j.gone[p] || j.failed[p]:
			return fmt.Errorf("%v has failed or ended", p)
		}
		if last = at; at < 0 {
			last = len(old)
		}
	}
	has := func(p elastic.Member) bool { return j.synced[p] }
	if len(j.synced) > 0 && !slices.ContainsFunc(r.Members, has) {
		return fmt.Errorf("no rank has the state of the training")
	}
	return nil
}
