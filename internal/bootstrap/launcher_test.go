package bootstrap

import (
	"fmt"
	"slices"
	"strconv"
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
	mvapichEnv = environment{
		"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
		"MV2_COMM_WORLD_LOCAL_SIZE": "2", "MPIRUN_RANK": "3", "PMI_PORT": "node1:77", "PMI_ID": "3",
	}
	jsrunEnv = environment{
		"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1",
		"JSM_NAMESPACE_LOCAL_SIZE": "2", "PMIX_RANK": "3", "PMIX_NAMESPACE": "7",
	}
	fluxEnv = environment{
		"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "3",
		"FLUX_JOB_ID": "ƒ7", "FLUX_JOB_TMPDIR": "/tmp/flux/jobtmp",
	}
	palsEnv = environment{"PALS_RANKID": "3", "PALS_NODEID": "1", "PALS_APID": "a"}
	pmixEnv = environment{"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-h-7@1"}

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
			"nowhere: only 4 of 8 ranks are on this host, and Open MPI does not say"},
		{"Open MPI, other names", openMPIEnv.with("PMIX_NAMESPACE", "", "PMIX_SERVER_TMPDIR", "",
			"OMPI_MCA_ess_base_jobid", "77",
			"OMPI_MCA_orte_jobfam_session_dir", "/tmp/fam"), "Open MPI 2/4 2/4 0/1 77",
			"published in a file in /tmp/fam"},
		{"Open MPI, PBS", openMPIEnv.with("PBS_VNODENUM", "16", "PBS_TASKNUM", "2"), "Open MPI 2/4 2/4 0/1 722141185", ""},
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
		{"Slurm, PMIx", slurmEnv.with("PMIX_RANK", "5", "PMIX_NAMESPACE", "slurm.pmix.1234.5"),
			"Slurm 5/7 1/2 2/3 1234.5", ""},
		{"Slurm, Cray", slurmEnv.with("PALS_RANKID", "5", "ALPS_APP_PE", "5"), "Slurm 5/7 1/2 2/3 1234.5", ""},
		{"torchrun, one pod", torchrunEnv.with("RANK", "0", "WORLD_SIZE", "1", "LOCAL_RANK", "0", "LOCAL_WORLD_SIZE", "1",
			"GROUP_RANK", "0", "GROUP_WORLD_SIZE", "1", "JOB_COMPLETION_INDEX", "0", "PET_NNODES", "1", "HOSTNAME", "t-node-0-0"),
			"torchrun 0/1 0/1 0/1 job7/2", "nowhere: there is one rank"},
		{"torchrun, srun", torchrunEnv.with("PMI_RANK", "0", "PMI_SIZE", "2", "PMI_FD", "9"),
			"torchrun 3/4 1/2 1/2 job7/2", ""},
		{"MVAPICH", mvapichEnv, "MVAPICH 3/4 1/2 -1/-1 ", "nowhere: only 2 of 4 ranks"},
		{"MVAPICH, mpiexec", mvapichEnv.with("PMI_RANK", "3", "PMI_SIZE", "4", "PMI_FD", "9"),
			"MVAPICH 3/4 1/2 -1/-1 ", "the key-value space"},
		{"MVAPICH, MASTER_ADDR", mvapichEnv.with("MASTER_ADDR", "head", "MASTER_PORT", "29500"),
			"MVAPICH 3/4 1/2 -1/-1 ", "published at head:29500"},
		{"MVAPICH 3", environment{"MVP_COMM_WORLD_RANK": "0", "MVP_COMM_WORLD_SIZE": "2"},
			"MVAPICH 0/2 -1/-1 -1/-1 ", "nowhere: MVAPICH does not say where rank 0 is"},
		{"jsrun", jsrunEnv, "LSF jsrun 3/4 1/2 -1/-1 7", "nowhere: only 2 of 4 ranks"},
		{"jsrun, one host", jsrunEnv.with("MASTER_ADDR", "localhost", "MASTER_PORT", "29500",
			"JSM_NAMESPACE_LOCAL_RANK", "3", "JSM_NAMESPACE_LOCAL_SIZE", "4"), "LSF jsrun 3/4 3/4 0/1 7",
			"published at 127.0.0.1:29500"},
		{"Cray PMI", environment{"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2",
			"PALS_RANKID": "3"}, "MPICH (PMI) 3/4 1/2 -1/-1 ", "nowhere: PMI_FD is not set"},
		{"AWS Batch", environment{"AWS_BATCH_JOB_ID": "j#1", "AWS_BATCH_JOB_NODE_INDEX": "1",
			"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
			"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1"}, "AWS Batch 1/2 0/1 1/2 j",
			"at a store of rank 0, 10.0.0.1:29550"},
		{"AWS Batch, plain", environment{"AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_NUM_NODES": "2",
			"RANK": "9", "WORLD_SIZE": "16", "MASTER_ADDR": "h", "MASTER_PORT": "5"},
			"plain environment 9/16 -1/-1 -1/-1 ", "published at h:5"},
		{"AWS Batch, main node", environment{"AWS_BATCH_JOB_ID": "j#0", "AWS_BATCH_JOB_NODE_INDEX": "0",
			"AWS_BATCH_JOB_NUM_NODES": "2"}, "AWS Batch 0/2 0/1 0/2 j", "rank 0, port 29550 of this host"},
		{"Flux", fluxEnv, "Flux 3/4 3/4 0/1 ƒ7", "published in a file in /tmp/flux/jobtmp"},
		{"Flux, hosts", fluxEnv.with("FLUX_JOB_NNODES", "2"), "Flux 3/4 -1/-1 -1/-1 ƒ7", "nowhere: Flux does"},
		{"Flux, PMI", fluxEnv.with("PMI_RANK", "3", "PMI_SIZE", "4", "PMI_FD", "9"),
			"MPICH (PMI) 3/4 -1/-1 -1/-1 ", "the key-value space"},
		{"PALS", palsEnv.with("HVD_SIZE", "4"), "Cray PALS 3/4 -1/-1 -1/-1 a", "nowhere: Cray PALS does"},
		{"PALS, RANK", palsEnv.with("RANK", "3", "WORLD_SIZE", "4", "MASTER_ADDR", "h", "MASTER_PORT", "1"),
			"plain environment 3/4 -1/-1 -1/-1 ", "published at h:1"},
		{"ALPS", environment{"ALPS_APP_PE": "3", "HVD_SIZE": "4", "ALPS_APP_ID": "b"},
			"Cray ALPS 3/4 -1/-1 -1/-1 b", ""},
		{"PMIx", pmixEnv.with("HVD_SIZE", "4", "MASTER_ADDR", "h", "MASTER_PORT", "1"),
			"PMIx 3/4 -1/-1 -1/-1 prterun-h-7@1", "published at h:1"},
		{"Kubernetes", kubernetesEnv, "Kubernetes 2/4 0/1 2/4 train",
			"at a store of rank 0, train-0.train:29550"},
		{"Kubernetes, a service", kubernetesEnv.with("HVD_SUBDOMAIN", "ranks"),
			"Kubernetes 2/4 0/1 2/4 train", "train-0.ranks:29550"},
		{"Kubernetes, full name", kubernetesEnv.with("HOSTNAME", "a-b-2.svc.ns.cluster.local"),
			"Kubernetes 2/4 0/1 2/4 a-b", "a-b-0.a-b:29550"},
		{"Kubernetes, hostNetwork", kubernetesEnv.with("HOSTNAME", "node7", "HVD_RENDEZVOUS_HOST", "train-0.train"),
			"Kubernetes 2/4 0/1 2/4 train-0.train", "train-0.train:29550"},
		{"Kubernetes, another port", kubernetesEnv.with("HVD_RENDEZVOUS_PORT", "7"), "Kubernetes 2/4 0/1 2/4 train",
			"at a store of rank 0, train-0.train:7"},
		{"Open MPI, the user's host", openMPIEnv.with("OMPI_COMM_WORLD_SIZE", "8", "HVD_RENDEZVOUS_HOST", "h",
			"HVD_RENDEZVOUS_PORT", "7"), "Open MPI 2/8 2/4 -1/-1 722141185", "at a store of rank 0, h:7"},
		{"Open MPI, no port", openMPIEnv.with("OMPI_COMM_WORLD_SIZE", "8", "HVD_RENDEZVOUS_HOST", "h"),
			"Open MPI 2/8 2/4 -1/-1 722141185", "nowhere: the port of rank 0 on h is unknown"},
		{"torchrun, another port", torchrunEnv.with("HVD_RENDEZVOUS_PORT", "7"), "torchrun 3/4 1/2 1/2 job7/2",
			"at the TCPStore of torchrun, head:29500"},
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
		{"plain, the user's host", environment{"RANK": "1", "WORLD_SIZE": "2", "HVD_RENDEZVOUS_HOST": "h",
			"HVD_RENDEZVOUS_PORT": "7"}, "plain environment 1/2 -1/-1 -1/-1 ", "published at h:7"},
		{"plain, not loopback", plainEnv.with("MASTER_ADDR", "localhost", "HVD_RENDEZVOUS_HOST", "h"),
			"plain environment 1/2 -1/-1 -1/-1 ", "published at h:29500"},
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
			port, _ := strconv.Atoi(c.env["HVD_RENDEZVOUS_PORT"])
			where, ok := e.Where(c.env["HVD_RENDEZVOUS_HOST"], port)
			if !strings.Contains(where, c.where) || ok == (strings.HasPrefix(where, "nowhere") && e.Size > 1) {
				t.Errorf("the ranks meet %s (%v), want %s", where, ok, c.where)
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
		{kubernetesEnv.with("HVD_SIZE", "", "JOB_COMPLETION_INDEX", "0", "HOSTNAME", "train-0", "PET_NNODES", "1"),
			[]string{"Kubernetes", "HVD_SIZE is not set"}},
		{kubernetesEnv.with("HVD_SIZE", ""), []string{"Kubernetes", "HVD_SIZE is not set",
			`JOB_COMPLETION_INDEX is "2"`}},
		{kubernetesEnv.with("HVD_SIZE", "2"), []string{"JOB_COMPLETION_INDEX is 2", "HVD_SIZE, which is 2"}},
		{kubernetesEnv.with("HOSTNAME", ""), []string{`HOSTNAME is ""`, "<job>-2"}},
		{kubernetesEnv.with("HOSTNAME", "train-3"), []string{`HOSTNAME is "train-3"`, "<job>-2"}},
		{kubernetesEnv.with("HOSTNAME", "-2"), []string{`HOSTNAME is "-2"`}},
		{environment{"HVD_SIZE": "4"}, []string{"Kubernetes", "JOB_COMPLETION_INDEX is not set",
			`HVD_SIZE is "4"`}},
		{pmiEnv.with("PMI_RANK", "", "PMI_SIZE", "", "PMI_PORT", "h:77", "PMI_ID", "3"),
			[]string{"PMI over a port", "HVD_SIZE is not set", `PMI_ID is "3"`}},
		{mvapichEnv.with("MV2_COMM_WORLD_SIZE", ""), []string{"MVAPICH", "MV2_COMM_WORLD_SIZE is not set"}},
		{environment{"MVP_COMM_WORLD_SIZE": "2"}, []string{"MVAPICH", "MVP_COMM_WORLD_RANK is not set"}},
		{jsrunEnv.with("JSM_NAMESPACE_RANK", ""), []string{"LSF jsrun", "JSM_NAMESPACE_RANK is not set"}},
		{jsrunEnv.with("JSM_NAMESPACE_LOCAL_SIZE", ""), []string{"JSM_NAMESPACE_LOCAL_SIZE is not set"}},
		{fluxEnv.with("FLUX_JOB_SIZE", ""), []string{"Flux", "FLUX_JOB_SIZE is not set"}},
		{palsEnv, []string{"Cray PALS", "HVD_SIZE is not set", `PALS_RANKID is "3"`, aloneAdvice}},
		{palsEnv.with("HVD_SIZE", "3"), []string{"PALS_RANKID is 3", "HVD_SIZE, which is 3"}},
		{environment{"ALPS_APP_PE": "3"}, []string{"Cray ALPS", "HVD_SIZE is not set", `ALPS_APP_PE is "3"`}},
		{pmixEnv, []string{"PMIx", "HVD_SIZE is not set", `PMIX_RANK is "3"`, aloneAdvice}},
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
		testnet.WantError(t, err, append(c.parts, "bootstrap: ")...)
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
		"torchrun: neither TORCHELASTIC_RUN_ID nor TORCHELASTIC_USE_AGENT_STORE is set",
		"Open MPI: neither OMPI_COMM_WORLD_RANK nor OMPI_COMM_WORLD_SIZE is set",
		"MVAPICH: none of MV2_COMM_WORLD_RANK, MV2_COMM_WORLD_SIZE, MVP_COMM_WORLD_RANK and MVP_COMM_WORLD_SIZE is set",
		"LSF jsrun: neither JSM_NAMESPACE_RANK nor JSM_NAMESPACE_SIZE is set",
		"MPICH (PMI): neither PMI_RANK nor PMI_SIZE is set",
		"Flux: neither FLUX_TASK_RANK nor FLUX_JOB_SIZE is set",
		"Slurm: SLURM_STEP_ID is not set: this process runs in an allocation, but is not a task of a step; start it with srun",
		"Kubernetes: JOB_COMPLETION_INDEX is not set",
		"AWS Batch: neither AWS_BATCH_JOB_NUM_NODES nor AWS_BATCH_JOB_NODE_INDEX is set",
		"plain environment: none of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT is set",
		"Cray PALS: PALS_RANKID is not set",
		"Cray ALPS: ALPS_APP_PE is not set",
		"PMIx: PMIX_RANK is not set",
		"PMI over a port: PMI_PORT is not set",
		"PBS pbsdsh: PBS_VNODENUM is not set",
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
		slurm := lines[slices.IndexFunc(lines, func(l Line) bool { return l.Kind == Slurm })]
		if e != nil || err != nil || !strings.Contains(slurm.Why, c.why) ||
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

// TestFirstWins sets the variables of several launchers for one process. Detect must return the first kind in
// the order of this test. Each iteration then removes the variables of that kind.
func TestFirstWins(t *testing.T) {
	env := environment{}
	kinds := []struct {
		kind Kind
		env  environment
	}{
		{Hvdrun, hvdrunEnv}, {Torchrun, torchrunEnv}, {OpenMPI, openMPIEnv}, {MVAPICH, mvapichEnv},
		{Jsrun, jsrunEnv}, {PMI, pmiEnv}, {Flux, fluxEnv}, {Slurm, slurmEnv},
		{Kubernetes, kubernetesEnv.with("JOB_COMPLETION_INDEX", "3", "HOSTNAME", "train-3")}, {Plain, plainEnv},
		{PALS, palsEnv.with("HVD_SIZE", "4")}, {PMIx, pmixEnv.with("HVD_SIZE", "4")},
	}
	for _, k := range slices.Backward(kinds) {
		for name, value := range k.env {
			env[name] = value
		}
	}
	env["RANK"] = "3"
	for i, k := range kinds {
		e, lines, err := Detect(env.get)
		if err != nil || e.Kind != k.kind {
			t.Fatalf("%s first: detected %v, %v; %v", k.kind, e, err, lines)
		}
		for j, k := range kinds {
			at := slices.IndexFunc(lines, func(l Line) bool { return l.Kind == k.kind })
			if l := lines[at]; l.Matched != (j == i) || l.Matched && l.Suspect {
				t.Errorf("with %s first, line %d is %v", kinds[i].kind, j, l)
			}
		}
		for name := range k.env {
			if later := slices.ContainsFunc(kinds[i+1:], func(k struct {
				kind Kind
				env  environment
			}) bool {
				return k.env[name] != ""
			}); !later {
				delete(env, name)
			}
		}
	}
	_, lines, _ := Detect(slurmEnv.with("JOB_COMPLETION_INDEX", "6", "HVD_SIZE", "x").get)
	wantLines(t, lines[8:10],
		"Slurm: rank 5 of 7, local rank 1 of 2, cross rank 2 of 3, by SLURM_STEP_ID",
		"Kubernetes: ignored, because Slurm takes precedence")
	// If the variables of the first launcher that matches contradict each other, Detect must return an error.
	// It must not try the launchers that come later.
	e, lines, err := Detect(openMPIEnv.with("PMI_RANK", "0", "PMI_SIZE", "1", "OMPI_COMM_WORLD_RANK",
		"9").get)
	if e != nil || err == nil || !strings.Contains(lines[6].Why, "ignored") {
		t.Errorf("detected %v, %v; %v", e, err, lines)
	}
}

// TestHiddenJob sets the variables of two launchers. If the process would be the only rank of a job, although
// a launcher has started several processes, Detect must return an error, unless HVD_SIZE says that the size
// is intended. If the job has several ranks, but fewer than processes, Suspect must be set.
func TestHiddenJob(t *testing.T) {
	ompi := func(rank, size string) environment {
		return environment{"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size, "PMIX_RANK": rank,
			"PMIX_NAMESPACE": "7"}
	}
	hvdrun := environment{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}
	slurm1 := environment{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
		"SLURM_STEP_NODELIST": "n"}
	for _, c := range []struct {
		name         string
		inner, outer environment
		// want is "error", "suspect" or "joined".
		want string
	}{
		{"smaller", ompi("0", "1"), slurmEnv, "error"},
		{"smaller, wanted", ompi("0", "1").with("HVD_SIZE", "1"), slurmEnv, "joined"},
		{"hvdrun", hvdrun, slurmEnv, "error"},
		{"hvdrun, wanted", hvdrun.with("HVD_SIZE", "1"), slurmEnv, "joined"},
		{"hvdrun in mpirun", hvdrun, ompi("2", "4"), "error"},
		{"size unknown", hvdrun, environment{"PALS_RANKID": "0"}, "error"},
		{"size unknown, Open MPI", ompi("0", "1"), environment{"PALS_RANKID": "0"}, "error"},
		{"size unknown, Kubernetes", hvdrun, environment{"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "x-0"}, "error"},
		{"rank too large", ompi("0", "1"), environment{"WORLD_SIZE": "1", "RANK": "1"}, "error"},
		{"rank unknown", ompi("0", "1"), environment{"WORLD_SIZE": "2"}, "error"},
		{"several ranks", ompi("0", "2"), slurmEnv, "suspect"},
		{"several ranks, wanted", ompi("0", "2").with("HVD_SIZE", "2"), slurmEnv, "joined"},
		{"equal", ompi("5", "7"), slurmEnv, "joined"},
		{"greater", ompi("5", "14"), slurmEnv, "joined"},
		{"one and one", ompi("0", "1"), slurm1, "joined"},
		{"one, PMIx", slurm1, environment{"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, "joined"},
		{"hvdrun, PMIx", hvdrun, slurm1.with("PMIX_RANK", "0", "PMIX_NAMESPACE", "slurm.pmix.7.0"), "joined"},
		{"one, other PMIx", slurm1, environment{"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-h-7@1"}, "error"},
		{"hvdrun, Cray", hvdrun, slurm1.with("PALS_RANKID", "0"), "joined"},
		{"MVAPICH", environment{"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "1"},
			environment{"PMI_PORT": "h:1", "PMI_ID": "0"}, "joined"},
		{"only an address", hvdrun, environment{"MASTER_ADDR": "h", "MASTER_PORT": "1"}, "joined"},
	} {
		env := c.inner.with()
		for name, value := range c.outer {
			env[name] = value
		}
		e, lines, err := Detect(env.get)
		got := "joined"
		switch {
		case err != nil:
			got = "error"
			testnet.WantError(t, err, "bootstrap: ", "would train alone", aloneAdvice)
		case slices.ContainsFunc(lines, func(l Line) bool { return l.Suspect }):
			got = "suspect"
		}
		if got != c.want || (e == nil) != (err != nil) {
			t.Errorf("%s: got %s, want %s: %v, %v, %v", c.name, got, c.want, e, err, lines)
		}
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
		if len(lines) != 17 || e != nil && err != nil {
			t.Fatalf("detected %v, %v; %v", e, err, lines)
		}
		if e == nil {
			return
		}
		if e.Rank < 0 || e.Rank >= e.Size || e.LocalRank >= 0 && e.LocalRank >= e.LocalSize ||
			e.LocalSize > e.Size ||
			e.CrossRank >= 0 && e.CrossRank >= e.CrossSize || e.host == "" ||
			e.port < slurmPortFirst || e.port >= slurmPortFirst+slurmPortCount {
			t.Fatalf("%q gives %s at %s:%d", values, e.place(), e.host, e.port)
		}
	})
}
