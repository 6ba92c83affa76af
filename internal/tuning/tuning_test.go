package tuning_test

import (
	"encoding/csv"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gohvd/gohvd/autotune"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/tuning"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// deadline limits how long a test waits for the goroutine of a Tuner.
const deadline = time.Minute

var start = message.Tuning{FusionThresholdBytes: 128 << 20, SegmentBytes: 256 << 10}

func options() autotune.Options {
	o := autotune.DefaultOptions()
	o.WarmupSamples, o.StepsPerSample, o.SamplesPerRound, o.MaxRounds = 1, 1, 1, 12
	return o
}

// program is a simulated training program with the tensors a and b. The duration of a step depends on the
// settings. It returns when the search has ended.
func program(t *testing.T, tuner *tuning.Tuner,
	duration func(message.Tuning) time.Duration) (values message.Tuning, seen []message.Tuning) {
	t.Helper()
	notified := make(chan struct{}, 1)
	tuner.Start(func() {
		select {
		case notified <- struct{}{}:
		default:
		}
	})
	values = start
	var now time.Duration
	for began := time.Now(); ; {
		if v, changed := tuner.Changed(); changed {
			values, seen = v, append(seen, v)
		}
		if !tuner.Stats().Active {
			tuner.Close()
			if v, changed := tuner.Changed(); changed {
				values, seen = v, append(seen, v)
			}
			return values, seen
		}
		tuner.Granted("a", 1<<20, now)
		tuner.Granted("b", 1<<10, now)
		if now += duration(values); time.Since(began) > deadline {
			t.Fatalf("the search has not ended after %v", deadline)
		}
	}
}

// best is the fastest for segments of 1 MiB and a cycle time of 0.8 ms.
func best(v message.Tuning) time.Duration {
	d := 10 * time.Millisecond
	if v.SegmentBytes != 1<<20 {
		d += time.Millisecond
	}
	if v.CacheOff {
		d += 20 * time.Millisecond
	}
	return d + max(v.CycleTime-800*time.Microsecond, 800*time.Microsecond-v.CycleTime)
}

// A search improves the settings, keeps those that the user has set, logs its result, and writes the table
// and the file. A later job begins with the settings in the file.
func TestSearch(t *testing.T) {
	dir := t.TempDir()
	logged, logs := observer.New(zap.InfoLevel)
	cfg := tuning.Config{
		Start: start, OverTCP: true, Search: true, Options: options(), Log: zap.New(logged),
		Given:   func(setting string) bool { return setting == "HOROVOD_FUSION_THRESHOLD" },
		LogPath: filepath.Join(dir, "log.csv"), File: filepath.Join(dir, "tuned.json"),
	}
	tuner, err := tuning.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	got, seen := program(t, tuner, best)
	if best(got) >= best(start) {
		t.Errorf("a step with %+v takes %v, want less than %v", got, best(got), best(start))
	}
	different := make(map[message.Tuning]bool)
	for _, v := range seen {
		different[v] = true
		if v.FusionThresholdBytes != start.FusionThresholdBytes {
			t.Fatalf("the fusion threshold was set by the user, but %+v was tried", v)
		}
	}
	if len(different) < 6 {
		t.Errorf("tried %d different settings, want at least 6", len(different))
	}
	if all := logs.FilterMessage("autotune has ended").All(); len(all) != 1 || logs.Len() != 1 {
		t.Errorf("got log lines %v, want one about the end", logs.All())
	}
	s := tuner.Stats()
	if s.Active || s.Rounds < 3 || s.Values != got || s.BytesPerSecond <= 0 {
		t.Errorf("got %+v, want the end of a search with %+v", s, got)
	}
	file, err := os.Open(cfg.LogPath)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	rows, err := csv.NewReader(file).ReadAll()
	if err != nil || len(rows) != s.Rounds+2 || rows[0][6] != "score" || rows[1][5] != "128" {
		t.Errorf("got table %v and error %v, want a row for each of %d rounds and the best", rows, err, s.Rounds)
	}

	cfg.Search, cfg.LogPath = false, filepath.Join(dir, "unused.csv")
	if tuner, err = tuning.New(cfg); err != nil {
		t.Fatal(err)
	}
	tuner.Start(func() {})
	defer tuner.Close()
	loaded, changed := tuner.Changed()
	if loaded != got || !changed || tuner.Stats().Active {
		t.Errorf("loaded %+v, changed %v, want %+v and no search", loaded, changed, got)
	}
	if _, changed := tuner.Changed(); changed {
		t.Error("the settings in the file change the settings twice")
	}
	if _, err := os.Stat(cfg.LogPath); err == nil {
		t.Error("a job without a search has written a table")
	}
}

// A value that the user has set never moves, and the others do.
func TestGivenValuesNeverMove(t *testing.T) {
	values := map[string]func(message.Tuning) any{
		"HOROVOD_FUSION_THRESHOLD":       func(v message.Tuning) any { return v.FusionThresholdBytes },
		"HOROVOD_CYCLE_TIME":             func(v message.Tuning) any { return v.CycleTime },
		"HOROVOD_CACHE_CAPACITY":         func(v message.Tuning) any { return v.CacheOff },
		"HOROVOD_HIERARCHICAL_ALLREDUCE": func(v message.Tuning) any { return v.OneLevelAllreduce },
		"HOROVOD_HIERARCHICAL_ALLGATHER": func(v message.Tuning) any { return v.OneLevelAllgather },
		"HVD_ALGORITHM":                  func(v message.Tuning) any { return v.Allreduce },
	}
	for given := range values {
		tuner, err := tuning.New(tuning.Config{
			Start: start, OverTCP: true, Search: true, Options: options(), Log: zap.NewNop(),
			Given: func(setting string) bool { return setting == given },
		})
		if err != nil {
			t.Fatal(err)
		}
		_, seen := program(t, tuner, best)
		for name, of := range values {
			moved := slices.ContainsFunc(seen, func(v message.Tuning) bool { return of(v) != of(start) })
			if fixed := name == given || strings.HasPrefix(given, "HVD_ALG") && strings.HasPrefix(name,
				"HVD_ALG"); moved == fixed {
				t.Errorf("%s is given: the value of %s has moved: %v, want %v", given, name, moved, !fixed)
			}
		}
	}
}

// Switches that are off at the start, because the job does not use them, stay off. Without TCP, neither the
// segment size nor the algorithm moves.
func TestUnusedValuesNeverMove(t *testing.T) {
	off := start
	off.OneLevelAllreduce, off.OneLevelAllgather, off.CacheOff = true, true, true
	tuner, err := tuning.New(tuning.Config{Start: off, Search: true, Options: options(), Log: zap.NewNop(),
		Given: func(string) bool { return false }})
	if err != nil {
		t.Fatal(err)
	}
	_, seen := program(t, tuner, best)
	for _, v := range seen {
		want := off
		want.FusionThresholdBytes, want.CycleTime = v.FusionThresholdBytes, v.CycleTime
		if v != want {
			t.Errorf("%+v was tried, want only other fusion thresholds and cycle times than in %+v", v, off)
		}
	}
}

// Every parameter can be fixed, and without any other parameter there is no search. The user learns of it.
func TestNothingToTune(t *testing.T) {
	logged, logs := observer.New(zap.WarnLevel)
	tuner, err := tuning.New(tuning.Config{Start: start, Search: true, Options: options(),
		Log: zap.New(logged), Given: func(string) bool { return true }})
	if err != nil {
		t.Fatal(err)
	}
	if tuner.Stats().Active || logs.Len() != 1 || !strings.Contains(logs.All()[0].Message, "nothing to tune") {
		t.Errorf("active %v, log %v, want no search and a warning", tuner.Stats().Active, logs.All())
	}
}

// Close ends a search in progress, in which the program submits nothing more. If at least two rounds have
// ended, the best settings so far are saved to the file to which the given path led at the start. A later
// search begins with them.
func TestCloseInTheMiddle(t *testing.T) {
	for rounds := range 4 {
		dir := t.TempDir()
		t.Chdir(dir)
		link := func(to, name string) {
			if err := errors.Join(os.MkdirAll("a/b", 0o700), os.Symlink(to, name)); err != nil {
				t.Fatal(err)
			}
		}
		link("a/b", "b") // so that b/.. is a
		link("shared.json", "a/tuned.json")
		logged, logs := observer.New(zap.InfoLevel)
		cfg := tuning.Config{Start: start, OverTCP: true, Search: true, Options: options(),
			Log: zap.New(logged), Given: func(string) bool { return false }, File: "b/../tuned.json"}
		tuner, err := tuning.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove("a/tuned.json"); err != nil {
			t.Fatal(err)
		}
		link("later.json", "a/tuned.json")
		t.Chdir(t.TempDir())
		cfg.File = filepath.Join(dir, "a", "shared.json")
		tuner.Start(func() {})
		tried, now := start, time.Duration(0)
		scores := map[message.Tuning]time.Duration{start: best(start)}
		for began := time.Now(); tuner.Stats().Rounds < rounds; {
			if v, changed := tuner.Changed(); changed {
				tried = v
				scores[v] = best(v)
			}
			tuner.Granted("a", 1<<20, now)
			if now += best(tried); time.Since(began) > deadline {
				t.Fatalf("%d rounds after %v, want %d", tuner.Stats().Rounds, deadline, rounds)
			}
		}
		tuner.Close()
		tuner.Close()
		_, err = os.Stat(cfg.File)
		if saved := err == nil; saved != (tuner.Stats().Rounds > 1) || saved != (logs.Len() == 1) {
			t.Errorf("%d rounds: saved %v, log %v, want both if there were at least two", tuner.Stats().Rounds,
				saved, logs.All())
		} else if !saved {
			continue
		}
		if tuner, err = tuning.New(cfg); err != nil {
			t.Fatal(err)
		}
		got, changed := tuner.Changed()
		if !changed {
			got = start
		}
		for v, d := range scores {
			if d < best(got) && v != tried {
				t.Errorf("%d rounds: saved %+v, but %+v is better", rounds, got, v)
			}
		}
	}
}

// An unusable file is an error that names the setting and the file. A search may begin without a file.
func TestFiles(t *testing.T) {
	dir := t.TempDir()
	broken := filepath.Join(dir, "broken.json")
	testnet.WriteFile(t, broken, `{"version": 9}`)
	missing, foreign, refused := filepath.Join(dir, "missing.json"), filepath.Join(dir, "link"), ""
	if err := os.Symlink(missing, foreign); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 { // else there is no link of another user
		refused = "HVD_AUTOTUNE_FILE is " + foreign + ": " + foreign + " is a link of user 1234"
		if err := os.Lchown(foreign, 1234, 1234); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		search        bool
		file, logPath string
		want          string
	}{
		{false, missing, "", "HVD_AUTOTUNE_FILE is " + missing + ": open"},
		{true, missing, "", ""},
		{true, foreign, "", refused},
		{true, broken, "", "HVD_AUTOTUNE_FILE is " + broken + ": autotune: load settings: version is 9, want 1"},
		{false, broken, "", "HVD_AUTOTUNE_FILE is " + broken + ": autotune"},
		{true, "", filepath.Join(dir, "no", "log.csv"), "HOROVOD_AUTOTUNE_LOG is " + dir},
	} {
		_, err := tuning.New(tuning.Config{Start: start, Search: c.search, Options: options(),
			Log: zap.NewNop(), Given: func(string) bool { return false }, File: c.file, LogPath: c.logPath})
		if got := fmt.Sprint(err); c.want == "" && err != nil || !strings.Contains(got, c.want) {
			t.Errorf("search %v, file %q, log %q: got error %v, want %q", c.search, c.file, c.logPath, err, c.want)
		}
	}
}
