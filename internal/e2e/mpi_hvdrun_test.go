package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testmpi"
	"github.com/gohvd/gohvd/internal/testnet"
)

// underMPI starts a job with hvdrun --mpi and the mpirun of a library.
func underMPI(t *testing.T, l testmpi.Library, command ...string) *job {
	t.Helper()
	return startCommand(t, append([]string{hvdrunPath, "--mpi", "-np", "3"}, command...), "PATH="+l.Path(t),
		"OMPI_MCA_mpi_yield_when_idle=1")
}

// sameWeights checks that each of n ranks has printed the result of the example, with the same weights, after
// a label.
func sameWeights(t *testing.T, l testmpi.Library, out string, n int) {
	t.Helper()
	label := `\[1,\d+\]<stdout>:`
	if l.Name == "mpich" {
		label = `\[\d+\] `
	}
	line := regexp.MustCompile(`(?m)^` + label + `digits: ranks=(\d+) .* weights_sha256=(\w+)`)
	same := map[string]int{}
	for _, e := range line.FindAllStringSubmatch(out, -1) {
		same[e[1]+" "+e[2]]++
	}
	for _, count := range same {
		if len(same) == 1 && count == n {
			return
		}
	}
	t.Errorf("got ranks and weights %v, want the same %d times:\n%s", same, n, out)
}

// hvdrun --mpi starts the ranks with mpirun. They use MPI without further settings, and mpirun labels their
// output and gets the arguments and the variables that are meant for it.
func TestHvdrunWithMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := digitsWithMPI(t, l)
		file := filepath.Join(t.TempDir(), "timeline.json")
		arg, tcp := "-x GIVEN=yes", "$OMPI_MCA_pml,$OMPI_MCA_btl = ob1,self,vader,tcp"
		if l.Name == "mpich" {
			arg, tcp = "-env GIVEN yes", "$UCX_TLS = tcp,self,sm"
		}
		j := underMPI(t, l, "--timeline-filename", file, "--mpi-args", arg, "--tcp", "sh", "-c",
			`test $GIVEN = yes && test `+tcp+` && exec "$0" -epochs 2`, program)
		j.ends(0)
		sameWeights(t, l, j.out(), 3)
		if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), "MPI_ALLREDUCE") {
			t.Errorf("the timeline has no MPI_ALLREDUCE (error %v)", err)
		}
	})
}

// If a rank is killed under hvdrun --mpi, the job ends and leaves no process, and the report names the rank.
// If hvdrun is killed, mpirun ends the job (see killHvdrun).
func TestDeathUnderHvdrunWithMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := digitsWithMPI(t, l)
		for _, victim := range testmpi.Sample(t, []int{0, 1, 2}) {
			// UCX would abort a survivor that copies from the memory of the victim.
			j := underMPI(t, l, "-x", "UCX_TLS=^cma", program, "-epochs", "1000000")
			for begun := time.Now(); len(ranksOf(program)) < 3 || !strings.Contains(j.out(), "epoch 2/"); {
				if time.Since(begun) > jobLimit {
					t.Fatalf("no training after %v:\n%s%s", jobLimit, j.out(), j.err())
				}
				time.Sleep(10 * time.Millisecond)
			}
			signalRank(t, program, victim, unix.SIGKILL)
			killed := time.Now()
			if status := j.wait(); status == 0 {
				t.Error("hvdrun has succeeded")
			}
			t.Logf("rank %d was killed, and the job ended after %v", victim, time.Since(killed))
			if left := ranksOf(program); left != nil {
				t.Errorf("processes %v are left", left)
			}
			cause := regexp.MustCompile(`Root cause \(found by the surviving ranks\): rank (\d) failed: `)
			if got := cause.FindStringSubmatch(j.err()); got == nil || got[1] != string(rune('0'+victim)) {
				t.Errorf("rank %d was killed, but the report does not say so:\n%s", victim, j.err())
			}
		}
		killHvdrun(t, l, program)
	})
}

// killHvdrun kills hvdrun --mpi. mpirun must end all processes, and leave no file of the MPI library in
// shared memory.
func killHvdrun(t *testing.T, l testmpi.Library, program string) {
	// Without this variable, Open MPI would put the files into /dev/shm beside those of other jobs.
	shared := t.TempDir()
	j := underMPI(t, l, "-x", "OMPI_MCA_btl_vader_backing_directory="+shared, program, "-epochs", "1000000")
	testnet.Eventually(t, "the ranks train", func() bool { return strings.Contains(j.out(), "epoch 2/") })
	files := func() []os.DirEntry {
		files, err := os.ReadDir(shared)
		if err != nil {
			t.Fatal(err)
		}
		return files
	}
	if got, want := len(files()), map[string]int{"openmpi": 3, "mpich": 0}[l.Name]; got != want {
		t.Errorf("the ranks have %d files in shared memory, want %d", got, want)
	}
	if err := j.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	j.wait()
	awaitEnd(t, program, time.Now().Add(jobLimit))
	testnet.Eventually(t, "mpirun removes the files", func() bool { return len(files()) == 0 })
}

// hvdrun --mpi trains on two hosts. mpirun reaches them by the command of --agent.
func TestHostsWithMPI(t *testing.T) {
	testmpi.Each(t, func(t *testing.T, l testmpi.Library) {
		program := digitsWithMPI(t, l)
		hosts := testnet.NewHosts(t, 2)
		for _, negotiation := range []string{"event", "lockstep"} {
			j := startCommand(t, append(on(t, hosts[0]), "PATH="+l.Path(t), "OMPI_MCA_mpi_yield_when_idle=1",
				"HVD_NEGOTIATION="+negotiation, hvdrunPath, "--mpi", "-H", list(hosts, layout{2, 2}, true), "--agent",
				enterAddress(t, hosts), program, "-epochs", "2"))
			j.ends(0)
			sameWeights(t, l, j.out(), 4)
		}
	})
}

// enterAddress returns a command that takes the place of ssh. It enters the host that has an address, under
// another host name, because MPI takes ranks with the same host name for neighbours.
func enterAddress(t *testing.T, hosts []*testnet.Host) string {
	t.Helper()
	text := "#!/bin/sh\naddr=$1\nshift\ncase $addr in\n"
	for _, h := range hosts {
		text += fmt.Sprintf("%s) exec ip netns exec %s unshare --uts sh -c 'hostname $0; exec \"$@\"' %[2]s \"$@\" ;;\n",
			h.Addr, h.Name)
	}
	path := filepath.Join(t.TempDir(), "enter")
	testnet.WriteScript(t, path, text+"esac\nexit 1\n")
	return path
}
