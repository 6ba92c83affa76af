package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/testnet"
)

// fakeMPIRun stands in for mpirun of MPICH. It starts the ranks, waits for rank 0, sends SIGKILL to the ranks
// in DOOMED, waits for all others, and ends with status 0, as MPICH may do although a rank has failed.
const fakeMPIRun = `#!/bin/sh
[ "$1" = --version ] && exec echo HYDRA
[ "$3" = -prepend-rank ] || exit 9
shift 3
for r in 0 1 2; do
	PMI_RANK=$r PMI_SIZE=3 "$@" &
	echo $! > $DIR/pid.$r
done
wait $(cat $DIR/pid.0)
for r in $DOOMED; do kill -9 $(cat $DIR/pid.$r); done
wait
$HANGS
exit 0
`

// TestMPIRunSucceeds checks the status and the report of hvdrun --mpi if mpirun ends with status 0. The job
// has failed if hvdrun has heard that a rank has failed, or if mpirun has not waited for all ranks. If mpirun
// does not end after a failure, hvdrun ends it.
func TestMPIRunSucceeds(t *testing.T) {
	// Rank 0 waits with this until the others have been started.
	const await = `touch $DIR/ready.$PMI_RANK; ` +
		`until [ -e $DIR/ready.1 ] && [ -e $DIR/ready.2 ]; do sleep 0.01; done; `
	for _, c := range []struct {
		name, command, doomed, hangs string
		status                       int
		cause                        string
	}{
		{"all ranks succeed", "exit 0", "", "", 0, ""},
		{"a rank fails", "[ $PMI_RANK != 1 ] || exit 3", "", "", 1, "rank 1 failed: exit status 3 (pid "},
		{"mpirun hangs", "[ $PMI_RANK != 1 ] || exit 3", "", "exec sleep 60", 143, "rank 1 failed: exit status 3 (pid "},
		{"a rank leaves", await + "[ $PMI_RANK = 0 ] || exec sleep 60", "1 2", "", 1,
			"rank 0 failed: its command has ended with status 0, and then mpirun has ended without waiting for 2 of 3 ranks\n"},
		{"survivors report a rank", await + `[ $PMI_RANK != 0 ] || "$SELF" accuse; [ $PMI_RANK = 0 ] || exec sleep 60`,
			"1 2", "", 1, "rank 1 failed: connection reset\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			testnet.WriteScript(t, filepath.Join(dir, "mpirun"), fakeMPIRun)
			self := testnet.Self(t)
			for name, value := range map[string]string{"PATH": dir + ":" + os.Getenv("PATH"), "DIR": dir, "DOOMED": c.doomed,
				"HANGS": c.hangs, "SELF": self} {
				t.Setenv(name, value)
			}
			_, stderr, status := output(t, "--mpi", "-np", "3", "sh", "-c", c.command)
			if status != c.status {
				t.Errorf("hvdrun ended with status %d, want %d", status, c.status)
			}
			want := "Root cause (found by the surviving ranks): " + c.cause
			if c.cause == "" && stderr != "" || c.cause != "" && !strings.Contains(stderr, want) {
				t.Errorf("got %q, want %q in it", stderr, want)
			}
		})
	}
}

// TestMPIBindTo checks that mpirun of either library gets the value of --bind-to, and that the ranks do not
// bind themselves as well.
func TestMPIBindTo(t *testing.T) {
	for version, want := range map[string]map[string]string{
		"mpirun (Open MPI) 4.1.4": {
			"":                                  "--bind-to none --map-by slot",
			"--bind-to=core":                    "--bind-to core --map-by slot",
			"--binding-args=--bind-to hwthread": "--bind-to hwthread sh",
		},
		"HYDRA build details": {
			"":               "-prepend-rank sh",
			"--bind-to=numa": "-prepend-rank -bind-to numa sh",
		},
	} {
		dir := t.TempDir()
		text := "#!/bin/sh\n[ \"$1\" != --version ] || { echo '" + version + "'; exit; }\n" +
			"echo \"$HVD_BIND_TO,$*\" | sed 's, [^ ]* __hvdrun-mpi-rank [^ ]*,,'\n"
		testnet.WriteScript(t, filepath.Join(dir, "mpirun"), text)
		t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
		for flag, words := range want {
			args := []string{"--mpi", "-np", "2", "sh"}
			if flag != "" {
				args = slices.Insert(args, 0, flag)
			}
			// mpirun has not started ranks, so the job has failed. Only its command line matters here.
			stdout, stderr, _ := output(t, args...)
			bindTo, line, _ := strings.Cut(strings.TrimSpace(stdout), ",")
			if !strings.Contains(line, words) || bindTo != "" && bindTo != "none" {
				t.Errorf("%s, %s: got HVD_BIND_TO=%q and %q, want %q in it; stderr %q", version, flag, bindTo, line, words, stderr)
			}
		}
	}
	_, stderr, status := output(t, "--mpi", "-np", "2", "--bind-to", "core", "--binding-args", "x", "true")
	if want := "--bind-to core and --binding-args cannot be used together"; status != 2 || !strings.Contains(stderr, want) {
		t.Errorf("got status %d and %q, want %q", status, stderr, want)
	}
}

// TestMPIVerdictWhileConnected checks that a job has failed if mpirun has ended and a rank has not reported
// the end of its command, also if a rank is still connected. If all have reported that, the job has not
// failed.
func TestMPIVerdictWhileConnected(t *testing.T) {
	for ranks, want := range map[int]string{1: "rank 0 failed: its command has ended with status 0, and then " +
		"mpirun has ended without waiting for 1 of 2 ranks", 2: ""} {
		r, rank := connected(t)
		for number := range ranks {
			if err := joblink.New(rank, number).Report(t.Context(), joblink.Exit, nil); err != nil {
				t.Fatal(err)
			}
		}
		passed, cancel := context.WithCancel(t.Context())
		cancel()
		if v, err := r.mpiVerdict(passed, true); v.Reason != want || (err == nil) != (want != "") {
			t.Errorf("%d of 2 ranks have ended: got %q, %v, want %q", ranks, v.Reason, err, want)
		}
	}
}
