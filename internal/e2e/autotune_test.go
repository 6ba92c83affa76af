package e2e

import (
	"encoding/csv"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// A job searches for settings until it has saved them. A setting of the user keeps its value. The next job
// begins with the saved settings. A job with a broken file fails at all ranks, with the name of the file.
func TestAutotune(t *testing.T) {
	for _, mode := range []string{"event", "lockstep"} {
		t.Run(mode, func(t *testing.T) {
			dir := t.TempDir()
			file, log := filepath.Join(dir, "tuned.json"), filepath.Join(dir, "log.csv")
			timeline := filepath.Join(dir, "timeline.json")
			env := []string{"E2E_END=" + file, "HOROVOD_CPU_OPERATIONS=tcp", "HVD_NEGOTIATION=" + mode}
			run := func(flags ...string) (*job, int) {
				flags = append(flags, "-np", "2", "--autotune-file", file, "--cycle-time-ms", "0.5")
				j := startHvdrun(t, nil, flags, "steps", env...)
				return j, j.wait()
			}
			if j, status := run("--autotune", "--autotune-log-file", log, "--autotune-warmup-samples", "1",
				"--autotune-steps-per-sample", "2", "--autotune-bayes-opt-max-samples", "6"); status != 0 {
				t.Fatalf("the search ended with status %d:\n%s%s", status, j.out(), j.err())
			}
			table, err := os.Open(log)
			if err != nil {
				t.Fatal(err)
			}
			defer table.Close()
			rows, err := csv.NewReader(table).ReadAll()
			if err != nil || len(rows) < 4 {
				t.Fatalf("got table %v and error %v, want a row for each round", rows, err)
			}
			column := slices.Index(rows[0], "cycle_time_ms")
			for _, row := range rows[1:] {
				if row[column] != "0.5" {
					t.Errorf("tried cycle time %s, want only 0.5, which the user has set", row[column])
				}
			}

			if j, status := run("--timeline-filename", timeline); status != 0 {
				t.Fatalf("the job with the file ended with status %d:\n%s%s", status, j.out(), j.err())
			}
			saved := testnet.ReadFile(t, file)
			events := testnet.ReadFile(t, timeline)
			_, bytes, _ := strings.Cut(string(saved), `"fusion_threshold_bytes": `)
			bytes, _, _ = strings.Cut(bytes, ",")
			changed := strings.Contains(string(events), `"hvd_tuning"`)
			score := slices.Index(rows[0], "score")
			first, best := rows[1], rows[len(rows)-1]
			differs := !slices.Equal(slices.Delete(slices.Clone(first), score, score+1),
				slices.Delete(slices.Clone(best), score, score+1))
			if changed != differs || changed &&
				!strings.Contains(string(events), `"fusion_threshold_bytes":`+bytes+",") {
				t.Errorf("the settings\n%sare in the timeline: %v, want %v:\n%s", saved, changed, differs, events)
			}

			testnet.WriteFile(t, file, "{")
			j, status := run()
			if n := strings.Count(j.err(), "HVD_AUTOTUNE_FILE is "+file); status == 0 || n < 2 {
				t.Errorf("with a broken file: got status %d, and %d ranks name the file, want 2:\n%s", status, n,
					j.err())
			}
		})
	}
}
