package place

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// Each of these maps holds the variables that one kind of launcher sets for a rank.
var (
	hvdrunEnv = environment{
		"HOROVOD_RANK": "5", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4",
		"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HVD_JOB_ID": "abc",
		"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
	}
	openMPIEnv = environment{
		"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
		"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "722141185",
		"PMIX_SERVER_TMPDIR": "/tmp/ompi.h.0/pid.7",
	}
	pmiEnv = environment{
		"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9",
	}
	torchrunEnv = environment{
		"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2",
		"TORCHELASTIC_USE_AGENT_STORE": "True",
		"RANK":                         "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
		"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
		"MASTER_ADDR": "head", "MASTER_PORT": "29500",
	}
	slurmEnv = environment{
		"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "5", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7",
		"SLURM_NTASKS":  "99",
		"SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_NODELIST": "node[01-03,7]",
		"SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
	}
	plainEnv      = environment{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
	kubernetesEnv = environment{"JOB_COMPLETION_INDEX": "2", "HVD_SIZE": "4", "HOSTNAME": "train-2"}
)

func TestDetect(t *testing.T) {
	for _, c := range []struct {
		name string
		env  environment
		// want is text with the kind, rank/size, local rank/local size, cross rank/cross size and the job.
		// where is the expected result of Where. If it is empty, the test does not check that result.
		want, where string
	}{
		{"hvdrun", hvdrunEnv, "hvdrun 5/8 1/4 1/2 abc", "at the store at 10.0.0.1:4711"},
		{"Horovod's", environment{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "hvdrun 0/2 -1/-1 -1/-1 ", ""},
		{"Horovod's, one", environment{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, "hvdrun 0/1 0/1 0/1 ",
			"nowhere: there is one rank"},
		{"hvdrun, one", hvdrunEnv.with("HOROVOD_RANK", "0", "HOROVOD_SIZE", "1", "HOROVOD_LOCAL_RANK", "0",
			"HOROVOD_LOCAL_SIZE", "1",
			"HOROVOD_CROSS_RANK", "0", "HOROVOD_CROSS_SIZE", "1"), "hvdrun 0/1 0/1 0/1 abc",
			"at the store at 10.0.0.1:4711"},
		{"Open MPI", openMPIEnv, "Open MPI 2/4 2/4 0/1 722141185",
			"published in a file in /tmp/ompi.h.0/pid.7"},
		{"Open MPI, hosts", openMPIEnv.with("OMPI_COMM_WORLD_SIZE", "8"), "Open MPI 2/8 2/4 -1/-1 722141185",
			"nowhere: Open MPI does not say"},
		{"Open MPI, other names", openMPIEnv.with("PMIX_NAMESPACE", "", "PMIX_SERVER_TMPDIR", "",
			"OMPI_MCA_ess_base_jobid", "77",
			"OMPI_MCA_orte_jobfam_session_dir", "/tmp/fam"), "Open MPI 2/4 2/4 0/1 77",
			"published in a file in /tmp/fam"},
		{"MPICH", pmiEnv, "MPICH (PMI) 3/4 1/2 -1/-1 ", "the key-value space"},
		{"MPICH, one host", pmiEnv.with("PMI_SIZE", "4", "MPI_LOCALRANKID", "3", "MPI_LOCALNRANKS", "4",
			"PMI_JOBID", "j"),
			"MPICH (PMI) 3/4 3/4 0/1 j", "the key-value space"},
		{"PMI without hosts", pmiEnv.with("MPI_LOCALRANKID", "", "MPI_LOCALNRANKS", ""),
			"MPICH (PMI) 3/4 -1/-1 -1/-1 ", ""},
		{"torchrun", torchrunEnv, "torchrun 3/4 1/2 1/2 job7/2", "at the TCPStore of torchrun, head:29500"},
		{"torchrun, rank 0's store", torchrunEnv.with("TORCHELASTIC_USE_AGENT_STORE", "False"),
			"torchrun 3/4 1/2 1/2 job7/2",
			"at a store of rank 0, published at head:29500"},
		{"torchrun, one host", torchrunEnv.with("TORCHELASTIC_USE_AGENT_STORE", "False", "LOCAL_RANK", "3",
			"LOCAL_WORLD_SIZE", "4",
			"GROUP_RANK", "0", "GROUP_WORLD_SIZE", "1"), "torchrun 3/4 3/4 0/1 job7/2",
			"at a store of rank 0, published at 127.0.0.1:29500"},
		{"torchrun, no run id", torchrunEnv.with("TORCHELASTIC_RUN_ID", "", "TORCHELASTIC_RESTART_COUNT", ""),
			"torchrun 3/4 1/2 1/2 none/0", ""},
		// The port is 29703 because 1234*97+5 = 119703.
		{"Slurm", slurmEnv, "Slurm 5/7 1/2 2/3 1234.5", "at a store of rank 0, node01:29703"},
		{"Slurm, last host", slurmEnv.with("SLURM_PROCID", "6", "SLURM_LOCALID", "0", "SLURM_NODEID", "3"),
			"Slurm 6/7 0/1 3/4 1234.5", ""},
		{"Slurm, size of the job", slurmEnv.with("SLURM_STEP_NUM_TASKS", "", "SLURM_NTASKS", "7"),
			"Slurm 5/7 1/2 2/3 1234.5", ""},
		{"Slurm, tasks asked for", slurmEnv.with("SLURM_STEP_TASKS_PER_NODE", "", "SLURM_NTASKS_PER_NODE",
			"2", "SLURM_STEP_NUM_TASKS", "8"),
			"Slurm 5/8 1/2 2/4 1234.5", ""},
		{"Slurm, other tasks asked for", slurmEnv.with("SLURM_STEP_TASKS_PER_NODE", "",
			"SLURM_NTASKS_PER_NODE", "2"),
			"Slurm 5/7 -1/-1 -1/-1 1234.5", ""},
		{"Slurm, one host", slurmEnv.with("SLURM_STEP_NODELIST", "n", "SLURM_NODEID", "",
			"SLURM_STEP_TASKS_PER_NODE", "7",
			"SLURM_LOCALID", "5"), "Slurm 5/7 5/7 0/1 1234.5", "at a store of rank 0, 127.0.0.1:29703"},
		{"Slurm, tasks unknown", slurmEnv.with("SLURM_STEP_TASKS_PER_NODE", ""),
			"Slurm 5/7 -1/-1 -1/-1 1234.5", ""},
		{"Slurm, node unknown", slurmEnv.with("SLURM_NODEID", ""), "Slurm 5/7 -1/-1 -1/-1 1234.5", ""},
		{"Slurm, last port", slurmEnv.with("SLURM_JOB_ID", "9999", "SLURM_STEP_ID", "102"),
			"Slurm 5/7 1/2 2/3 9999.102", "node01:20005"},
		{"Kubernetes", kubernetesEnv, "Kubernetes 2/4 0/1 2/4 train",
			"at a store of rank 0, train-0.train:29550"},
		{"Kubernetes, a service", kubernetesEnv.with("HVD_SUBDOMAIN", "ranks"),
			"Kubernetes 2/4 0/1 2/4 train", "train-0.ranks:29550"},
		{"Kubernetes, full name", kubernetesEnv.with("HOSTNAME", "a-b-2.svc.ns.cluster.local"),
			"Kubernetes 2/4 0/1 2/4 a-b", "a-b-0.a-b:29550"},
		{"Kubernetes, alone", kubernetesEnv.with("HVD_SIZE", "1"), "HVD_SIZE=1 0/1 0/1 0/1 ",
			"nowhere: there is one rank"},
		{"plain", plainEnv, "plain environment 1/2 -1/-1 -1/-1 ",
			"at a store of rank 0, published at head:29500"},
		{"plain, loopback", plainEnv.with("MASTER_ADDR", "localhost"), "plain environment 1/2 -1/-1 -1/-1 ",
			"published at 127.0.0.1:29500"},
		{"plain, IPv6 loopback", plainEnv.with("MASTER_ADDR", "::1"), "plain environment 1/2 -1/-1 -1/-1 ",
			"published at 127.0.0.1:29500"},
		{"plain, local", plainEnv.with("WORLD_SIZE", "4", "LOCAL_RANK", "1", "LOCAL_WORLD_SIZE", "2"),
			"plain environment 1/4 1/2 -1/-1 ", "head:29500"},
		{"plain, half of local", plainEnv.with("LOCAL_RANK", "7"), "plain environment 1/2 -1/-1 -1/-1 ", ""},
		{"plain, one", environment{"RANK": "0", "WORLD_SIZE": "1"}, "plain environment 0/1 0/1 0/1 ",
			"nowhere: there is one rank"},
		{"plain, alone", plainEnv.with("HVD_SIZE", "1"), "HVD_SIZE=1 0/1 0/1 0/1 ",
			"nowhere: there is one rank"},
		{"plain, by an id", plainEnv.with("MASTER_ADDR", "", "HVD_UNIQUE_ID", "x"),
			"plain environment 1/2 -1/-1 -1/-1 ", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := detect(t, c.env)
			got := fmt.Sprintf("%s %d/%d %d/%d %d/%d %s", e.Kind, e.Rank, e.Size, e.LocalRank, e.LocalSize,
				e.CrossRank, e.CrossSize, e.JobID)
			if got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
			if !strings.Contains(e.Where(), c.where) {
				t.Errorf("the ranks meet %s, want %s", e.Where(), c.where)
			}
		})
	}
}

func TestDetectRefuses(t *testing.T) {
	for _, c := range []struct {
		env   environment
		parts []string
	}{
		{hvdrunEnv.with("HOROVOD_RANK", ""), []string{"hvdrun", "HOROVOD_RANK is not set",
			`HOROVOD_SIZE is "8"`}},
		{hvdrunEnv.with("HOROVOD_SIZE", ""), []string{"HOROVOD_SIZE is not set", `HOROVOD_RANK is "5"`}},
		{hvdrunEnv.with("HOROVOD_RANK", "8"), []string{"HOROVOD_RANK is 8", "HOROVOD_SIZE, which is 8"}},
		{hvdrunEnv.with("HOROVOD_RANK", "x"), []string{`HOROVOD_RANK is "x"`}},
		{hvdrunEnv.with("HOROVOD_RANK", "-1"), []string{`HOROVOD_RANK is "-1"`}},
		{hvdrunEnv.with("HOROVOD_SIZE", "4294967296"), []string{`HOROVOD_SIZE is "4294967296"`}},
		{hvdrunEnv.with("HOROVOD_RANK", "0", "HOROVOD_SIZE", "0"),
			[]string{"HOROVOD_RANK is 0", "which is 0"}},
		{hvdrunEnv.with("HOROVOD_LOCAL_RANK", ""), []string{"HOROVOD_LOCAL_RANK is not set"}},
		{hvdrunEnv.with("HOROVOD_LOCAL_RANK", "4"), []string{"HOROVOD_LOCAL_RANK is 4",
			"HOROVOD_LOCAL_SIZE, which is 4"}},
		{hvdrunEnv.with("HOROVOD_LOCAL_SIZE", "9"), []string{"HOROVOD_LOCAL_SIZE is 9", "8 ranks"}},
		{hvdrunEnv.with("HOROVOD_CROSS_SIZE", ""), []string{"HOROVOD_CROSS_SIZE is not set"}},
		{hvdrunEnv.with("HOROVOD_CROSS_SIZE", "9"), []string{"HOROVOD_CROSS_SIZE is 9"}},
		{hvdrunEnv.with("HOROVOD_GLOO_RENDEZVOUS_PORT", "65536"),
			[]string{"HOROVOD_GLOO_RENDEZVOUS_PORT is 65536"}},
		{hvdrunEnv.with("HOROVOD_GLOO_RENDEZVOUS_PORT", "0"), []string{"HOROVOD_GLOO_RENDEZVOUS_PORT is 0"}},
		{openMPIEnv.with("OMPI_COMM_WORLD_SIZE", ""),
			[]string{"Open MPI", "OMPI_COMM_WORLD_SIZE is not set"}},
		{openMPIEnv.with("OMPI_COMM_WORLD_RANK", ""), []string{"OMPI_COMM_WORLD_RANK is not set"}},
		{openMPIEnv.with("OMPI_COMM_WORLD_RANK", "4"), []string{"OMPI_COMM_WORLD_RANK is 4"}},
		{pmiEnv.with("PMI_RANK", ""), []string{"PMI_RANK is not set"}},
		{pmiEnv.with("PMI_SIZE", "1e3"), []string{`PMI_SIZE is "1e3"`}},
		{pmiEnv.with("PMI_FD", "six"), []string{`PMI_FD is "six"`}},
		{torchrunEnv.with("RANK", "", "WORLD_SIZE", ""), []string{"torchrun", "neither RANK nor WORLD_SIZE",
			`TORCHELASTIC_RUN_ID is "job7"`}},
		{torchrunEnv.with("RANK", ""), []string{"RANK is not set"}},
		{torchrunEnv.with("TORCHELASTIC_RESTART_COUNT", "two"),
			[]string{`TORCHELASTIC_RESTART_COUNT is "two"`}},
		{torchrunEnv.with("MASTER_ADDR", ""), []string{"MASTER_ADDR not set"}},
		{torchrunEnv.with("MASTER_PORT", ""), []string{"MASTER_PORT not set"}},
		{torchrunEnv.with("MASTER_PORT", "99999"), []string{"MASTER_PORT is 99999"}},
		{slurmEnv.with("SLURM_PROCID", ""), []string{"Slurm", "SLURM_PROCID is not set",
			`SLURM_STEP_NUM_TASKS is "7"`}},
		{slurmEnv.with("SLURM_STEP_NUM_TASKS", "", "SLURM_NTASKS", ""), []string{"SLURM_NTASKS is not set",
			`SLURM_PROCID is "5"`}},
		{slurmEnv.with("SLURM_STEP_NUM_TASKS", "", "SLURM_NTASKS", "", "SLURM_PROCID", ""),
			[]string{"neither SLURM_PROCID nor SLURM_NTASKS"}},
		{slurmEnv.with("SLURM_PROCID", "7"),
			[]string{"SLURM_PROCID is 7", "SLURM_STEP_NUM_TASKS, which is 7"}},
		{slurmEnv.with("SLURM_STEP_ID", "five"), []string{`SLURM_STEP_ID is "five"`}},
		{slurmEnv.with("SLURM_JOB_ID", ""), []string{"SLURM_JOB_ID is not set"}},
		{slurmEnv.with("SLURM_STEP_NODELIST", ""), []string{"SLURM_STEP_NODELIST is not set"}},
		{slurmEnv.with("SLURM_STEP_NODELIST", "n[1-"), []string{"SLURM_STEP_NODELIST", `"n[1-"`}},
		{slurmEnv.with("SLURM_NODEID", "4"), []string{"SLURM_NODEID is 4", "4 hosts"}},
		{slurmEnv.with("SLURM_STEP_TASKS_PER_NODE", "2(x"), []string{"SLURM_STEP_TASKS_PER_NODE", `"2(x"`}},
		{slurmEnv.with("SLURM_STEP_TASKS_PER_NODE", "2(x3)"), []string{"SLURM_STEP_TASKS_PER_NODE",
			"6 tasks on 3 hosts", "7 tasks", "4 hosts"}},
		{slurmEnv.with("SLURM_STEP_TASKS_PER_NODE", "3,3,1"), []string{"7 tasks on 3 hosts", "4 hosts"}},
		{slurmEnv.with("SLURM_STEP_TASKS_PER_NODE", "2(x4)"), []string{"8 tasks on 4 hosts", "7 tasks"}},
		{slurmEnv.with("SLURM_LOCALID", "2"), []string{"SLURM_LOCALID is 2", "node 2", "2 tasks"}},
		{kubernetesEnv.with("HVD_SIZE", ""), []string{"Kubernetes", "HVD_SIZE is not set",
			`JOB_COMPLETION_INDEX is "2"`}},
		{kubernetesEnv.with("HVD_SIZE", "2"), []string{"JOB_COMPLETION_INDEX is 2", "HVD_SIZE, which is 2"}},
		{kubernetesEnv.with("HOSTNAME", ""), []string{`HOSTNAME is ""`, "<job>-2"}},
		{kubernetesEnv.with("HOSTNAME", "train-3"), []string{`HOSTNAME is "train-3"`, "<job>-2"}},
		{kubernetesEnv.with("HOSTNAME", "-2"), []string{`HOSTNAME is "-2"`}},
		{environment{"HVD_SIZE": "4"}, []string{"Kubernetes", "JOB_COMPLETION_INDEX is not set",
			`HVD_SIZE is "4"`}},
		{plainEnv.with("RANK", ""), []string{"plain environment", "RANK is not set", `WORLD_SIZE is "2"`,
			"to run this process as a job with one rank, set HVD_SIZE=1"}},
		{plainEnv.with("WORLD_SIZE", ""), []string{"WORLD_SIZE is not set", `RANK is "1"`}},
		{plainEnv.with("RANK", "", "WORLD_SIZE", ""), []string{"neither RANK nor WORLD_SIZE is set",
			`MASTER_ADDR is "head"`}},
		{plainEnv.with("RANK", "2"), []string{"RANK is 2", "WORLD_SIZE, which is 2"}},
		{plainEnv.with("RANK", "one"), []string{`RANK is "one"`}},
		{plainEnv.with("MASTER_ADDR", ""),
			[]string{"rank 1 of 2 does not know where the ranks meet: MASTER_ADDR not set"}},
		{plainEnv.with("MASTER_PORT", ""), []string{"MASTER_PORT not set"}},
		{plainEnv.with("MASTER_ADDR", "", "MASTER_PORT", ""),
			[]string{"MASTER_ADDR and MASTER_PORT not set"}},
		{plainEnv.with("MASTER_PORT", "http"), []string{`MASTER_PORT is "http"`}},
		{environment{"WORLD_SIZE": "2"}, []string{"RANK is not set"}},
	} {
		e, lines, err := Detect(c.env.get)
		if e != nil {
			t.Errorf("%v: rank %d of %d", c.env, e.Rank, e.Size)
		}
		testnet.WantError(t, err, append(c.parts, "place: ")...)
		if err == nil {
			continue
		}
		said := false
		for _, l := range lines {
			said = said || strings.Contains(err.Error(), l.Why)
			if l.Matched {
				t.Errorf("%v: line %q", c.env, l)
			}
		}
		if !said {
			t.Errorf("%v: no line says %v", c.env, err)
		}
	}
}

func TestNoLauncher(t *testing.T) {
	e, lines, err := Detect(environment{"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0",
		"LOCAL_RANK": "0"}.get)
	if e != nil || err != nil {
		t.Errorf("detected %v, %v", e, err)
	}
	wantLines(t, lines,
		"hvdrun: neither HOROVOD_RANK nor HOROVOD_SIZE is set",
		"HVD_SIZE=1: HVD_SIZE is not 1",
		"Open MPI: neither OMPI_COMM_WORLD_RANK nor OMPI_COMM_WORLD_SIZE is set",
		"MPICH (PMI): neither PMI_RANK nor PMI_SIZE is set",
		"torchrun: neither TORCHELASTIC_RUN_ID nor TORCHELASTIC_USE_AGENT_STORE is set",
		"Slurm: SLURM_STEP_ID is not set: this process runs in an allocation, but is not a task of a step; start it with srun",
		"Kubernetes: JOB_COMPLETION_INDEX is not set",
		"plain environment: none of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT is set",
	)
	// These processes run in a Slurm allocation but not in a step. If the allocation is for several tasks,
	// Suspect must be set, because the user may have forgotten srun.
	for _, c := range []struct {
		env     environment
		why     string
		suspect bool
	}{
		{environment{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, "an allocation, but", false},
		{environment{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "an allocation for SLURM_NTASKS=4 tasks, but",
			true},
		{slurmEnv.with("SLURM_STEP_ID", "4294967291", "SLURM_NTASKS", ""),
			"4294967291: this process is a script in an allocation, but", false},
		{slurmEnv.with("SLURM_STEP_ID", "4294967291"),
			"4294967291: this process is a script in an allocation for SLURM_NTASKS=99 tasks, but", true},
	} {
		e, lines, err := Detect(c.env.get)
		if slurm := lines[5]; e != nil || err != nil || !strings.Contains(slurm.Why, c.why) ||
			slurm.Suspect != c.suspect {
			t.Errorf("detected %v, %v; %v, suspect: %v", e, err, slurm, slurm.Suspect)
		}
	}
}

func wantLines(t *testing.T, lines []Line, want ...string) {
	t.Helper()
	var got []string
	for _, l := range lines {
		got = append(got, l.String())
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestFirstWins sets the variables of several launchers. Detect must return the first kind in the order of
// this test. Each iteration then removes the variables of that kind.
func TestFirstWins(t *testing.T) {
	env := environment{}
	kinds := []struct {
		kind Kind
		env  environment
	}{{Hvdrun, hvdrunEnv}, {OpenMPI, openMPIEnv}, {PMI, pmiEnv}, {Torchrun, torchrunEnv}, {Slurm, slurmEnv},
		{Kubernetes, kubernetesEnv}, {Plain, plainEnv}}
	for _, k := range kinds {
		for name, value := range k.env {
			env[name] = value
		}
	}
	for i, k := range kinds {
		e, lines, err := Detect(env.get)
		if err != nil || e.Kind != k.kind || len(lines) != len(kinds)+1 {
			t.Fatalf("detected %v, %v; %v", e, err, lines)
		}
		lines = slices.Delete(lines, 1, 2) // remove the Line of HVD_SIZE=1
		for j, l := range lines {
			if l.Kind != kinds[j].kind || l.Matched != (j == i) {
				t.Errorf("with %s first, line %d is %v", k.kind, j, l)
			}
			if j > i && !strings.Contains(l.Why, "ignored (rank") {
				t.Errorf("with %s first, line %d is %v", k.kind, j, l)
			}
		}
		for name := range k.env {
			if k.kind != Torchrun || plainEnv[name] == "" {
				delete(env, name)
			}
		}
	}
	_, lines, _ := Detect(slurmEnv.with("JOB_COMPLETION_INDEX", "7", "HVD_SIZE", "x").get)
	wantLines(t, lines[5:7],
		"Slurm: rank 5 of 7, local rank 1 of 2, cross rank 2 of 3, by SLURM_STEP_ID",
		"Kubernetes: ignored, because Slurm takes precedence")
	// If the variables of the first launcher that matches contradict each other, Detect must return an error.
	// It must not try the launchers that come later.
	e, lines, err := Detect(openMPIEnv.with("PMI_RANK", "0", "PMI_SIZE", "1", "OMPI_COMM_WORLD_RANK",
		"9").get)
	if e != nil || err == nil || !strings.Contains(lines[3].Why, "ignored") {
		t.Errorf("detected %v, %v; %v", e, err, lines)
	}
}

// FuzzDetect sets Slurm's variables to arbitrary values. Detect must return an error or consistent ranks and
// sizes.
func FuzzDetect(f *testing.F) {
	names := []string{
		"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
		"SLURM_NODEID",
		"SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE",
	}
	var seed []string
	for _, n := range names {
		seed = append(seed, slurmEnv[n])
	}
	f.Add(strings.Join(seed, "\n"))
	f.Add("1\n2\n0\n2\n0\n0\na\n2")
	f.Fuzz(func(t *testing.T, values string) {
		env := make(environment)
		for i, v := range strings.SplitN(values, "\n", len(names)) {
			env[names[i]] = v
		}
		e, lines, err := Detect(env.get)
		if len(lines) != 8 || e != nil && err != nil {
			t.Fatalf("detected %v, %v; %v", e, err, lines)
		}
		if e == nil {
			return
		}
		if e.Rank < 0 || e.Rank >= e.Size || e.LocalRank >= 0 && e.LocalRank >= e.LocalSize ||
			e.LocalSize > e.Size ||
			e.CrossRank >= 0 && e.CrossRank >= e.CrossSize || e.host == "" ||
			e.port < slurmPortFirst || e.port >= slurmPortFirst+slurmPortCount {
			t.Fatalf("%q gives %s at %s", values, e.place(), e.Where())
		}
	})
}
