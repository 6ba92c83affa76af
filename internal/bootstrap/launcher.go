package bootstrap

import (
	"cmp"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
)

// Kind is a kind of launcher. Its text is the usual name of the launcher.
type Kind string

// These are the kinds of launchers, in the order in which Detect checks them.
const (
	Hvdrun     Kind = "hvdrun"
	Alone      Kind = "HVD_SIZE=1"
	Torchrun   Kind = "torchrun"
	OpenMPI    Kind = "Open MPI"
	MVAPICH    Kind = "MVAPICH"
	Jsrun      Kind = "LSF jsrun"
	PMI        Kind = "MPICH (PMI)"
	Flux       Kind = "Flux"
	Slurm      Kind = "Slurm"
	Kubernetes Kind = "Kubernetes"
	Batch      Kind = "AWS Batch"
	// Plain means that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, and that no variables of a
	// known launcher are set.
	Plain Kind = "plain environment"
	// These launchers tell a process its rank, but not the number of ranks.
	PALS Kind = "Cray PALS"
	ALPS Kind = "Cray ALPS"
	PMIx Kind = "PMIx"
	// PMIPort is a launcher that speaks PMI at the address PMI_PORT, instead of on the descriptor PMI_FD.
	PMIPort Kind = "PMI over a port"
	PBS     Kind = "PBS pbsdsh"
)

// way is how the ranks meet.
type way int

const (
	// byUser means that the launcher does not say where rank 0 is. So the user must.
	byUser     way = iota
	atLauncher     // at the store of hvdrun, or of a program that sets hvdrun's variables
	atAgent        // at the TCPStore of torchrun's agent
	atMaster       // at a store of rank 0, which it publishes in a TCPStore at MASTER_ADDR:MASTER_PORT
	atHost         // at a store of rank 0, whose host the launcher names
	byFile         // at a store of rank 0, which it publishes in a file in the job's directory
	byPMI          // at a store of rank 0, which it publishes in the key-value space of PMI
)

// Env is what the launcher says about this process: its rank, the size of the job, and the place where the
// ranks meet. Unknown numbers are -1.
type Env struct {
	Kind       Kind
	Rank, Size int
	// LocalRank is the number of this rank among the ranks on this host, and LocalSize is the number of ranks
	// on this host. CrossRank is the number of this host among the hosts that have a rank with the same
	// LocalRank, and CrossSize is the number of those hosts.
	LocalRank, LocalSize, CrossRank, CrossSize int
	// JobID is the same at all ranks of a job and differs between jobs. It is empty if the environment does
	// not contain it. With MPICH, the launcher sends it later, and Place.JobID contains it.
	JobID string

	met atomic.Bool

	// Each way to meet uses only some of the fields host to loopback.
	way   way
	host  string // host of the store, which rank 0 or the launcher serves
	port  int    // port of that store, 0 if unknown
	dir   string // directory of the job on this host, which the variable dirName names
	pmiFD int    // -1 if unknown
	node  int    // number of this host in the job, -1 if unknown
	// dirName is the variable from which dir comes. If way is atMaster, hostName and portName are the
	// settings that say where the ranks meet.
	dirName, hostName, portName string
	// missing says what of the launcher would let the ranks meet. It is used only if way is byUser.
	missing string
	// loopback is true if the address at which the ranks meet is a loopback address. Then this rank assumes
	// that all other ranks are on this host too.
	loopback bool
}

// Line is a line of the result of Detect. It says whether one kind of launcher has started this process.
type Line struct {
	Kind Kind
	// Matched is true if Detect returns the Env of this kind. At most one Line has Matched set.
	Matched bool
	// Why says why the kind matched or did not match, and names the variables that decided it.
	Why string
	// Suspect is true if the launcher seems to have started more processes than the job of this process has
	// ranks.
	Suspect bool
}

// String returns the line as text for users.
func (l Line) String() string { return string(l.Kind) + ": " + l.Why }

// Detect finds the launcher of this process. getenv returns the value of an environment variable, like
// os.Getenv. An empty variable counts as not set. If no kind matches, Env is nil. If the variables of the
// first kind that matches contradict each other, Detect returns an error. It also returns an error if the
// first kind says that this process is the only rank of its job, and another kind says that it is one process
// of several. In all cases it returns one Line for each kind, in order.
func Detect(getenv func(string) string) (*Env, []Line, error) {
	kinds := []struct {
		kind Kind
		find func(*variables) (e *Env, why string)
	}{
		{Hvdrun, findHvdrun},
		{Alone, findAlone},
		{Torchrun, findTorchrun},
		{OpenMPI, findOpenMPI},
		{MVAPICH, findMVAPICH},
		{Jsrun, findJsrun},
		{PMI, findPMI},
		{Flux, findFlux},
		{Slurm, findSlurm},
		{Kubernetes, findKubernetes},
		{Batch, findBatch},
		{Plain, findPlain},
		{PALS, findPALS},
		{ALPS, findALPS},
		{PMIx, findPMIx},
		{PMIPort, findPMIPort},
		{PBS, findPBS},
	}
	var (
		found    *Env
		firstErr error
		first    Kind
		lines    []Line
		// incomplete is the error if no kind matches, although variables that belong to a kind are set.
		incomplete error
		// asked is the index of the line that finds an allocation of several tasks, or -1.
		asked = -1
	)
	for _, k := range kinds {
		v := &variables{getenv: getenv}
		e, why := k.find(v)
		line := Line{Kind: k.kind, Why: why, Suspect: v.suspect}
		if v.suspect {
			asked = len(lines)
		}
		switch {
		case e == nil:
			if v.err != nil && incomplete == nil {
				incomplete = fmt.Errorf("bootstrap: %s: %w; %s", k.kind, v.err, aloneAdvice)
			}
		case found != nil && found.hides(e) && getenv("HVD_SIZE") != strconv.Itoa(found.Size):
			line.Suspect = true
			line.Why = fmt.Sprintf("%s says that this process is rank %d of %d, but %s says %s", first,
				found.Rank, found.Size, k.kind, e.place())
			if found.Size == 1 && firstErr == nil {
				firstErr = fmt.Errorf("bootstrap: %s: each process that %s has started would train alone: start "+
					"the ranks with only one of them, or remove the variables of the other; %s", line.Why, k.kind,
					aloneAdvice)
			}
		case first != "":
			line.Why = fmt.Sprintf("ignored, because %s takes precedence", first)
			if v.err == nil {
				line.Why = fmt.Sprintf("ignored (%s), because %s takes precedence", e.place(), first)
			}
		case v.err != nil:
			first, firstErr = k.kind, fmt.Errorf("bootstrap: %s: %w", k.kind, v.err)
			if k.kind != Hvdrun {
				firstErr = fmt.Errorf("%w; %s", firstErr, aloneAdvice)
			}
			line.Why = v.err.Error()
		default:
			e.Kind, first, found = k.kind, k.kind, e
			line.Matched = true
			line.Why = fmt.Sprintf("%s, by %s", e.place(), why)
		}
		lines = append(lines, line)
	}
	if first == "" {
		firstErr = incomplete
	} else if asked >= 0 {
		lines[asked].Suspect = false // the user has started the ranks of the allocation in another way
	}
	if firstErr != nil {
		found = nil
		for i := range lines {
			lines[i].Matched = false
		}
	}
	return found, lines, firstErr
}

// aloneAdvice is the end of errors that a user avoids with a job of one rank.
const aloneAdvice = "to run this process as a job with one rank, set HVD_SIZE=1"

// hides reports whether other, which a later kind of launcher says about this process, shows that the job of
// e does not contain all processes that this launcher has started. The rank or the size of other may be
// unknown.
func (e *Env) hides(other *Env) bool {
	if e.Kind == Alone {
		return false
	}
	return other.Size > e.Size || other.Rank >= e.Size || e.Size == 1 && other.Rank >= 0 && other.Size < 0
}

func (e *Env) place() string {
	s := fmt.Sprintf("rank %d of %d", e.Rank, e.Size)
	switch {
	case e.Rank < 0:
		return fmt.Sprintf("an unknown rank of %d", e.Size)
	case e.Size < 0:
		return fmt.Sprintf("rank %d of an unknown number", e.Rank)
	}
	if e.LocalRank >= 0 {
		s += fmt.Sprintf(", local rank %d of %d", e.LocalRank, e.LocalSize)
	}
	if e.CrossRank >= 0 {
		s += fmt.Sprintf(", cross rank %d of %d", e.CrossRank, e.CrossSize)
	}
	return s
}

// OneHost reports whether e shows that all ranks of the job are on this host.
func (e *Env) OneHost() bool { return e.LocalSize == e.Size || e.loopback }

// variables reads the environment for one kind of launcher. It keeps the first error.
type variables struct {
	getenv  func(string) string
	err     error
	suspect bool // the value for Line.Suspect
}

func (v *variables) fail(format string, args ...any) {
	if v.err == nil {
		v.err = fmt.Errorf(format, args...)
	}
}

// firstSet returns the first of the given names whose variable is set. If none is set, ok is false.
func (v *variables) firstSet(names ...string) (name string, ok bool) {
	for _, name := range names {
		if v.getenv(name) != "" {
			return name, true
		}
	}
	return "", false
}

// number returns the value of a variable, which must be a number of at least 0. If the variable is not set,
// or if its value is not such a number, number returns -1.
func (v *variables) number(name string) int {
	text := v.getenv(name)
	if text == "" {
		return -1
	}
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil || n < 0 {
		v.fail("%s is %s, want a number from 0 to %d", name, quote(text), math.MaxInt32)
		return -1
	}
	return int(n)
}

// pair returns the values of two variables, which hold a rank and the number of ranks. If neither variable is
// set, it returns -1 and -1.
func (v *variables) pair(rankName, sizeName string) (rank, size int) {
	if _, ok := v.firstSet(rankName, sizeName); !ok {
		return -1, -1
	}
	rank, size = v.number(rankName), v.number(sizeName)
	for _, unset := range [][2]string{{rankName, sizeName}, {sizeName, rankName}} {
		if v.getenv(unset[0]) == "" {
			v.fail("%s is not set, but %s is %s", unset[0], unset[1], quote(v.getenv(unset[1])))
		}
	}
	if rank >= size {
		v.fail("%s is %d, want less than %s, which is %d", rankName, rank, sizeName, size)
	}
	return rank, size
}

// part is like pair, but for variables about a part of the job, such as the ranks on one host. If the part
// has more ranks than the job, part records an error.
func (v *variables) part(rankName, sizeName string, e *Env) (rank, size int) {
	rank, size = v.pair(rankName, sizeName)
	if size > e.Size {
		v.fail("%s is %d, but the job has only %d ranks", sizeName, size, e.Size)
	}
	return rank, size
}

// newEnv returns an Env with the given rank and size. If size is 1, newEnv also sets the local and cross
// ranks and sizes. All other fields are unknown.
func newEnv(rank, size int) *Env {
	e := &Env{Rank: rank, Size: size, LocalRank: -1, LocalSize: -1, CrossRank: -1, CrossSize: -1, pmiFD: -1,
		node: -1}
	if size == 1 {
		e.LocalRank, e.LocalSize, e.CrossRank, e.CrossSize = 0, 1, 0, 1
	}
	return e
}

// deriveCross sets the cross rank to 0 and the cross size to 1 if all ranks of the job are on one host and
// the cross rank is unknown.
func (e *Env) deriveCross() {
	if e.OneHost() && e.CrossRank < 0 {
		e.CrossRank, e.CrossSize = 0, 1
	}
}

// mpi returns the Env of a process whose launcher sets rank, size, local rank and local size. The parameters
// are the names of the environment variables that hold these values.
func (v *variables) mpi(rank, size, localRank, localSize string) *Env {
	e := newEnv(v.pair(rank, size))
	if r, n := v.part(localRank, localSize, e); r >= 0 {
		e.LocalRank, e.LocalSize = r, n
	}
	e.deriveCross()
	return e
}

func (v *variables) port(name string) int {
	n := v.number(name)
	if n == 0 || n > math.MaxUint16 {
		v.fail("%s is %d, want a port", name, n)
	}
	return max(n, 0)
}

func findHvdrun(v *variables) (*Env, string) {
	why, ok := v.firstSet("HOROVOD_RANK", "HOROVOD_SIZE")
	if !ok {
		return nil, "neither HOROVOD_RANK nor HOROVOD_SIZE is set"
	}
	e := v.mpi("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
	if r, n := v.part("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", e); r >= 0 {
		e.CrossRank, e.CrossSize = r, n
	}
	e.JobID, e.way = v.getenv("HVD_JOB_ID"), atLauncher
	e.host, e.port = v.getenv("HOROVOD_GLOO_RENDEZVOUS_ADDR"), v.port("HOROVOD_GLOO_RENDEZVOUS_PORT")
	return e, why
}

func findAlone(v *variables) (*Env, string) {
	if v.getenv("HVD_SIZE") != "1" {
		return nil, "HVD_SIZE is not 1"
	}
	return newEnv(0, 1), "HVD_SIZE"
}

func findOpenMPI(v *variables) (*Env, string) {
	why, ok := v.firstSet("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
	if !ok {
		return nil, "neither OMPI_COMM_WORLD_RANK nor OMPI_COMM_WORLD_SIZE is set"
	}
	e := v.mpi("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
		"OMPI_COMM_WORLD_LOCAL_SIZE")
	// Open MPI 5.x gives jobs names such as prterun-host-pid@1. Open MPI 4.x gives them numbers.
	e.JobID = v.getenv("PMIX_NAMESPACE")
	if e.JobID == "" {
		e.JobID = v.getenv("OMPI_MCA_ess_base_jobid")
	}
	// Each of these variables holds the path of a directory that this mpirun has created on this host. Only
	// the user can read the directory, and mpirun removes it at the end. OMPI_FILE_LOCATION is not used,
	// because its directory is removed when the first rank ends.
	v.meeting(e, "PMIX_SERVER_TMPDIR", "OMPI_MCA_orte_jobfam_session_dir")
	return e, why
}

// meeting sets the way to meet under a launcher that does not name the host of rank 0. Each of dirs is a
// variable that may contain the path of a directory of the job on this host, which only this user can enter.
func (v *variables) meeting(e *Env, dirs ...string) {
	dirName, ok := v.firstSet(dirs...)
	switch {
	case e.pmiFD >= 0:
		e.way = byPMI
	case ok && e.OneHost():
		e.way, e.dirName, e.dir = byFile, dirName, v.getenv(dirName)
	case v.getenv("MASTER_ADDR") != "" && v.getenv("MASTER_PORT") != "":
		v.master(e)
		e.loopback = isLoopback(e.host)
	case len(dirs) > 0 && e.OneHost():
		e.missing = dirs[0] + " is not set"
	case e.LocalSize > 0 && !e.OneHost():
		e.missing = fmt.Sprintf("only %d of %d ranks are on this host", e.LocalSize, e.Size)
	}
}

func isLoopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

func findMVAPICH(v *variables) (*Env, string) {
	// MVAPICH2 sets the first four variables, and MVAPICH 3 the others.
	for _, prefix := range []string{"MV2_COMM_WORLD_", "MVP_COMM_WORLD_"} {
		if why, ok := v.firstSet(prefix+"RANK", prefix+"SIZE"); ok {
			e := v.mpi(prefix+"RANK", prefix+"SIZE", prefix+"LOCAL_RANK", prefix+"LOCAL_SIZE")
			if v.getenv("PMI_RANK") == v.getenv(prefix+"RANK") {
				e.pmiFD = v.number("PMI_FD") // mpiexec of MVAPICH is that of MPICH
			}
			v.meeting(e)
			return e, why
		}
	}
	return nil, "none of MV2_COMM_WORLD_RANK, MV2_COMM_WORLD_SIZE, MVP_COMM_WORLD_RANK and " +
		"MVP_COMM_WORLD_SIZE is set"
}

func findJsrun(v *variables) (*Env, string) {
	why, ok := v.firstSet("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")
	if !ok {
		return nil, "neither JSM_NAMESPACE_RANK nor JSM_NAMESPACE_SIZE is set"
	}
	e := v.mpi("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
		"JSM_NAMESPACE_LOCAL_SIZE")
	e.JobID = v.getenv("PMIX_NAMESPACE")
	v.meeting(e)
	return e, why
}

func findPMI(v *variables) (*Env, string) {
	why, ok := v.firstSet("PMI_RANK", "PMI_SIZE")
	if !ok {
		return nil, "neither PMI_RANK nor PMI_SIZE is set"
	}
	local := [2]string{"MPI_LOCALRANKID", "MPI_LOCALNRANKS"}
	if v.getenv(local[0]) == "" {
		local = [2]string{"PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"} // Cray PMI
	}
	e := v.mpi("PMI_RANK", "PMI_SIZE", local[0], local[1])
	e.JobID, e.pmiFD = v.getenv("PMI_JOBID"), v.number("PMI_FD")
	if v.meeting(e); e.pmiFD < 0 {
		e.missing = "PMI_FD is not set"
	}
	return e, why
}

func findFlux(v *variables) (*Env, string) {
	why, ok := v.firstSet("FLUX_TASK_RANK", "FLUX_JOB_SIZE")
	if !ok {
		return nil, "neither FLUX_TASK_RANK nor FLUX_JOB_SIZE is set"
	}
	e := newEnv(v.pair("FLUX_TASK_RANK", "FLUX_JOB_SIZE"))
	if v.number("FLUX_JOB_NNODES") == 1 {
		e.LocalRank, e.LocalSize = e.Rank, e.Size
	}
	e.deriveCross()
	e.JobID = v.getenv("FLUX_JOB_ID")
	// Only the user can enter this directory, and the job shell removes it at the end.
	v.meeting(e, "FLUX_JOB_TMPDIR")
	return e, why
}

// rankOnly returns the Env of a process whose launcher sets the rank in the variable rankName, but not the
// number of ranks. The user gives that number in HVD_SIZE. Each of others is a variable in which a launcher
// that also sets rankName sets the same rank. If one of them contains this rank, rankOnly returns nil.
func (v *variables) rankOnly(rankName string, others ...string) (*Env, string) {
	rank := v.getenv(rankName)
	if rank == "" {
		return nil, rankName + " is not set"
	}
	for _, name := range others {
		if v.getenv(name) == rank {
			return nil, fmt.Sprintf("%s is %s, as %s", rankName, quote(rank), name)
		}
	}
	if v.getenv("HVD_SIZE") == "" {
		v.fail("HVD_SIZE is not set, but %s is %s: no variable contains the number of ranks, so set HVD_SIZE to "+
			"that number", rankName, quote(rank))
		return newEnv(v.number(rankName), -1), ""
	}
	e := newEnv(v.pair(rankName, "HVD_SIZE"))
	v.meeting(e)
	return e, rankName
}

// findPALS finds mpiexec and aprun of Cray's Parallel Application Launch Service. Slurm and Flux set the same
// variables on machines of Cray. If PALS sets the variables of PMI too, findPMI has found them.
func findPALS(v *variables) (*Env, string) {
	e, why := v.rankOnly("PALS_RANKID", "SLURM_PROCID", "FLUX_TASK_RANK", "PMI_RANK")
	if e != nil {
		e.JobID = v.getenv("PALS_APID")
	}
	return e, why
}

// findALPS finds aprun of older machines of Cray.
func findALPS(v *variables) (*Env, string) {
	e, why := v.rankOnly("ALPS_APP_PE", "SLURM_PROCID", "PMI_RANK")
	if e != nil {
		e.JobID = v.getenv("ALPS_APP_ID")
	}
	return e, why
}

// findPMIPort finds mpiexec -pmi-port of MPICH. mpirun_rsh of MVAPICH, which sets the same variables, also
// sets those of findMVAPICH.
func findPMIPort(v *variables) (*Env, string) {
	if v.getenv("PMI_PORT") == "" {
		return nil, "PMI_PORT is not set"
	}
	return v.rankOnly("PMI_ID", "PMI_RANK", "MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK")
}

// findPBS finds pbsdsh of PBS and Torque. The script or the interactive shell of a job has the same
// variables, as task 1 on the first node.
func findPBS(v *variables) (*Env, string) {
	if v.getenv("PBS_VNODENUM") == "0" && v.getenv("PBS_TASKNUM") == "1" {
		return nil, "PBS_VNODENUM is 0 and PBS_TASKNUM is 1: this process is the script or the shell of a job, " +
			"and no task of pbsdsh"
	}
	// The task manager of PBS also starts the daemons of mpirun, whose ranks inherit the variables.
	for _, size := range []string{"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} {
		if v.number(size) > 1 {
			return nil, fmt.Sprintf("%s is %s, so mpirun has started this process", size, quote(v.getenv(size)))
		}
	}
	e, why := v.rankOnly("PBS_VNODENUM")
	if e != nil {
		e.JobID = v.getenv("PBS_JOBID")
	}
	return e, why
}

// slurmNamespace begins the PMIx namespace of a step of Slurm.
const slurmNamespace = "slurm.pmix."

// findPMIx finds launchers such as prterun, whose processes get the number of ranks only from a server of
// PMIx.
func findPMIx(v *variables) (*Env, string) {
	namespace := v.getenv("PMIX_NAMESPACE")
	if strings.HasPrefix(namespace, slurmNamespace) {
		return nil, "PMIX_NAMESPACE is " + quote(namespace) + ", as Slurm sets it"
	}
	e, why := v.rankOnly("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PMI_RANK", "FLUX_TASK_RANK",
		"PALS_RANKID")
	if e != nil {
		e.JobID = namespace
	}
	return e, why
}

func findTorchrun(v *variables) (*Env, string) {
	why, ok := v.firstSet("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
	if !ok {
		return nil, "neither TORCHELASTIC_RUN_ID nor TORCHELASTIC_USE_AGENT_STORE is set"
	}
	if _, ok := v.firstSet("RANK", "WORLD_SIZE"); !ok {
		v.fail("neither RANK nor WORLD_SIZE is set, but %s is %s", why, quote(v.getenv(why)))
	}
	e := v.mpi("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
	// GROUP_RANK numbers the agents of torchrun. There is usually one agent per host. If several agents share
	// a host, LOCAL_WORLD_SIZE is smaller than the number of ranks on the host.
	if r, n := v.part("GROUP_RANK", "GROUP_WORLD_SIZE", e); r >= 0 {
		e.CrossRank, e.CrossSize = r, n
	}
	restarts := max(v.number("TORCHELASTIC_RESTART_COUNT"), 0)
	run := v.getenv("TORCHELASTIC_RUN_ID")
	if run == "" {
		run = "none" // the id that torchrun itself uses for a run without an id
	}
	e.JobID = run + "/" + strconv.Itoa(restarts)
	v.master(e)
	// PyTorch compares the value in the same way, including the case.
	if v.getenv("TORCHELASTIC_USE_AGENT_STORE") == "True" {
		e.way = atAgent
	}
	return e, why
}

// master makes the ranks meet at MASTER_ADDR and MASTER_PORT, as PyTorch's ranks do, or at the host and the
// port of MeetOptions.
func (v *variables) master(e *Env) {
	e.way, e.port = atMaster, v.port("MASTER_PORT")
	e.hostName, _ = v.firstSet("HVD_RENDEZVOUS_HOST", "MASTER_ADDR")
	e.portName, _ = v.firstSet("HVD_RENDEZVOUS_PORT", "MASTER_PORT")
	e.host = v.getenv(e.hostName)
	if _, ok := v.firstSet("HVD_INIT_METHOD", "HVD_UNIQUE_ID"); ok || e.Size < 2 {
		return // the settings of gohvd decide where to meet, and a single rank needs no address
	}
	var missing []string
	if e.hostName == "" {
		missing = append(missing, "MASTER_ADDR")
	}
	if e.portName == "" {
		missing = append(missing, "MASTER_PORT")
	}
	if len(missing) > 0 {
		v.fail("rank %d of %d does not know where the ranks meet: %s not set", e.Rank, e.Size,
			strings.Join(missing, " and "))
	}
}

func findPlain(v *variables) (*Env, string) {
	why, ok := v.firstSet("RANK", "WORLD_SIZE")
	if !ok {
		if name, ok := v.firstSet("MASTER_ADDR", "MASTER_PORT"); ok {
			v.fail("neither RANK nor WORLD_SIZE is set, but %s is %s", name, quote(v.getenv(name)))
			return nil, v.err.Error()
		}
		return nil, "none of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT is set"
	}
	e := newEnv(v.pair("RANK", "WORLD_SIZE"))
	// Scripts often set LOCAL_RANK without LOCAL_WORLD_SIZE, for torch.cuda.set_device. In this case the
	// local ranks are computed later from the hosts of all ranks.
	if v.getenv("LOCAL_RANK") != "" && v.getenv("LOCAL_WORLD_SIZE") != "" {
		e.LocalRank, e.LocalSize = v.part("LOCAL_RANK", "LOCAL_WORLD_SIZE", e)
	}
	e.deriveCross()
	v.master(e)
	e.loopback = isLoopback(e.host)
	return e, why
}

// firstSpecialStep is the lowest of the step numbers that Slurm uses for steps without tasks, such as batch
// scripts (slurm.h).
const firstSpecialStep = 0xfffffff0

func findSlurm(v *variables) (*Env, string) {
	id := v.getenv("SLURM_STEP_ID")
	if id == "" {
		if _, ok := v.firstSet("SLURM_JOB_ID"); ok {
			return nil, "SLURM_STEP_ID is not set: this process runs in " + v.slurmAllocation() +
				", but is not a task of a step; start it with srun"
		}
		return nil, "SLURM_STEP_ID is not set"
	}
	step, err := strconv.ParseUint(id, 10, 32)
	if err == nil && step >= firstSpecialStep {
		return nil, "SLURM_STEP_ID is " + id + ": this process is a script in " + v.slurmAllocation() +
			", but not a task of a step; start it with srun"
	}
	if err != nil {
		v.fail("SLURM_STEP_ID is %s, want a number", quote(id))
	}
	// In a step, both variables contain the number of tasks of the step.
	sizeName, ok := v.firstSet("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
	if !ok {
		sizeName = "SLURM_NTASKS"
	}
	if _, ok := v.firstSet("SLURM_PROCID", sizeName); !ok {
		v.fail("neither SLURM_PROCID nor SLURM_NTASKS is set, but SLURM_STEP_ID is %s", quote(id))
	}
	e := newEnv(v.pair("SLURM_PROCID", sizeName))
	job := v.number("SLURM_JOB_ID")
	if job < 0 {
		v.fail("SLURM_JOB_ID is not set, but SLURM_STEP_ID is %s", quote(id))
	}
	e.JobID = fmt.Sprintf("%d.%d", job, step)
	e.port = slurmPort(uint64(job), step)
	v.slurmHosts(e)
	return e, "SLURM_STEP_ID"
}

// slurmAllocation returns a description of the allocation for a process that runs in an allocation of Slurm
// but not in a step. If the allocation has several tasks, slurmAllocation sets v.suspect, because the user
// may have meant the process to be one of the tasks.
func (v *variables) slurmAllocation() string {
	text := v.getenv("SLURM_NTASKS")
	if n, err := strconv.Atoi(text); err != nil || n < 2 {
		return "an allocation"
	}
	v.suspect = true
	return "an allocation for SLURM_NTASKS=" + text + " tasks"
}

// If the user chooses no port, the ranks of a step of Slurm meet at a port in this range. The range is below
// 32768, because Linux assigns ports from 32768 upwards to sockets that do not ask for a particular port.
const (
	slurmPortFirst = 20000
	slurmPortCount = 10000
)

// slurmPort returns a port for a step of a job. Different steps of a job get different ports, and so do jobs
// whose numbers are close to each other.
func slurmPort(job, step uint64) int {
	return slurmPortFirst + int((job%slurmPortCount*97+step)%slurmPortCount)
}

// slurmHosts sets the first host of the step, and the local rank and cross rank of this process.
func (v *variables) slurmHosts(e *Env) {
	list := v.getenv("SLURM_STEP_NODELIST")
	if list == "" {
		v.fail("SLURM_STEP_NODELIST is not set, but SLURM_STEP_ID is %s", quote(v.getenv("SLURM_STEP_ID")))
		return
	}
	hosts, err := ExpandHosts(list)
	if err != nil {
		v.fail("SLURM_STEP_NODELIST: %w", err)
		return
	}
	e.way, e.host = atHost, hosts[0]
	e.node = v.number("SLURM_NODEID")
	if len(hosts) == 1 && e.node < 0 {
		e.node = 0
	}
	if e.node >= len(hosts) {
		v.fail("SLURM_NODEID is %d, but SLURM_STEP_NODELIST has %d hosts", e.node, len(hosts))
		return
	}
	local, tasks := v.number("SLURM_LOCALID"), v.slurmTasks(len(hosts), e.Size)
	if local < 0 || e.node < 0 || tasks == nil || v.err != nil {
		return
	}
	if local >= tasks[e.node] {
		v.fail("SLURM_LOCALID is %d, but node %d of the step has %d tasks", local, e.node, tasks[e.node])
		return
	}
	e.LocalRank, e.LocalSize = local, tasks[e.node]
	// A host with fewer tasks has no rank with this local rank, so it does not count.
	e.CrossRank, e.CrossSize = 0, 0
	for i, n := range tasks {
		if n > local {
			if i < e.node {
				e.CrossRank++
			}
			e.CrossSize++
		}
	}
}

// slurmTasks returns the number of tasks on each host of the step, or nil if the numbers are unknown.
func (v *variables) slurmTasks(hosts, size int) []int {
	if _, ok := v.firstSet("SLURM_STEP_TASKS_PER_NODE"); !ok {
		// SLURM_NTASKS_PER_NODE is the number of tasks per host that the user requested. A step may have
		// fewer tasks on a host. So the variable is used only if it gives the right number of tasks for the
		// whole step.
		if n := v.number("SLURM_NTASKS_PER_NODE"); n > 0 && n <= size && n*hosts == size {
			return slices.Repeat([]int{n}, hosts)
		}
		return nil
	}
	tasks, err := ExpandTasks(v.getenv("SLURM_STEP_TASKS_PER_NODE"))
	if err != nil {
		v.fail("SLURM_STEP_TASKS_PER_NODE: %w", err)
		return nil
	}
	sum := 0
	for _, n := range tasks {
		sum += n
	}
	if len(tasks) != hosts || sum != size {
		v.fail("SLURM_STEP_TASKS_PER_NODE is %s, which means %d tasks on %d hosts, but the step has %d tasks and "+
			"SLURM_STEP_NODELIST has %d hosts", quote(v.getenv("SLURM_STEP_TASKS_PER_NODE")), sum, len(tasks), size, hosts)
		return nil
	}
	return tasks
}

// KubernetesPort is the port at which the pods of a job, or the nodes of AWS Batch, meet if the user does not
// choose a port.
const KubernetesPort = 29550

func findKubernetes(v *variables) (*Env, string) {
	index := v.getenv("JOB_COMPLETION_INDEX")
	if index == "" {
		if size := v.getenv("HVD_SIZE"); size != "" && size != "1" {
			v.fail("JOB_COMPLETION_INDEX is not set, but HVD_SIZE is %s", quote(size))
			return nil, v.err.Error()
		}
		return nil, "JOB_COMPLETION_INDEX is not set"
	}
	// If the pod sets setHostnameAsFQDN, a domain follows its name.
	host := v.getenv("HOSTNAME")
	name, _, _ := strings.Cut(host, ".")
	sizeName := "HVD_SIZE"
	switch {
	case v.getenv("HVD_SIZE") != "":
	case v.getenv("PET_NNODES") == "1" && strings.HasSuffix(name, "-node-0-0"):
		// Kubeflow Trainer sets it for torchrun to the number of pods, which have such names. In other jobs,
		// each pod may run a torchrun of one node.
		sizeName = "PET_NNODES"
	default:
		v.fail("HVD_SIZE is not set, but JOB_COMPLETION_INDEX is %s: Kubernetes does not tell a pod how many pods there are, so "+
			"set HVD_SIZE to the number of completions of the job", quote(index))
	}
	e := newEnv(v.pair("JOB_COMPLETION_INDEX", sizeName))
	// A pod has its own network and its own shared memory, so it counts as a host.
	e.LocalRank, e.LocalSize, e.CrossRank, e.CrossSize = 0, 1, e.Rank, e.Size
	e.way, e.port = atHost, KubernetesPort
	// The host name of a pod with hostNetwork is that of its node. So a host that the user gives replaces it.
	if first := v.getenv("HVD_RENDEZVOUS_HOST"); first != "" {
		e.JobID, e.host = first, first
		return e, "JOB_COMPLETION_INDEX"
	}
	// The controller of indexed jobs gives a pod the host name <job>-<index>.
	job, ok := strings.CutSuffix(name, "-"+index)
	if !ok || job == "" {
		v.fail("HOSTNAME is %s and JOB_COMPLETION_INDEX is %s, want a host name <job>-%s, or the host of rank 0 in "+
			"HVD_RENDEZVOUS_HOST", quote(host), quote(index), index)
	}
	e.JobID = job
	domain := v.getenv("HVD_SUBDOMAIN")
	if domain == "" {
		domain = job
	}
	e.host = job + "-0." + domain
	return e, "JOB_COMPLETION_INDEX"
}

// findBatch finds multi-node parallel jobs of AWS Batch, which run one container on each node. The program of
// a container may start several ranks and set the variables of findPlain for them.
func findBatch(v *variables) (*Env, string) {
	const indexName, sizeName, mainName = "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES",
		"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
	why, ok := v.firstSet(sizeName, indexName)
	if !ok {
		return nil, "neither " + sizeName + " nor " + indexName + " is set"
	}
	if v.getenv("RANK") != "" && v.getenv("WORLD_SIZE") != "" {
		return nil, "RANK and WORLD_SIZE are set"
	}
	e := newEnv(v.pair(indexName, sizeName))
	e.LocalRank, e.LocalSize, e.CrossRank, e.CrossSize = 0, 1, e.Rank, e.Size
	if main := v.number("AWS_BATCH_JOB_MAIN_NODE_INDEX"); main > 0 {
		v.fail("AWS_BATCH_JOB_MAIN_NODE_INDEX is %d, want 0, because rank 0 must be on the main node", main)
	}
	// The id of a node's own job is <job>#<index>.
	e.JobID, _, _ = strings.Cut(v.getenv("AWS_BATCH_JOB_ID"), "#")
	e.way, e.host, e.port = atHost, v.getenv(mainName), KubernetesPort
	if _, ok := v.firstSet(mainName, "HVD_RENDEZVOUS_HOST"); !ok && e.Rank > 0 {
		v.fail("%s is not set, but %s is %d", mainName, indexName, e.Rank)
	}
	return e, why
}

// Where returns a text for users that says where the ranks meet, and whether they can meet. host and port are
// MeetOptions.Host and MeetOptions.Port.
func (e *Env) Where(host string, port int) (text string, ok bool) {
	way := e.way
	switch {
	case e.Size == 1 && (way != atLauncher || e.host == ""):
		return "nowhere: there is one rank", true
	case way == atLauncher:
		host, port = e.host, e.port
	case host != "" && way != atMaster && way != byPMI:
		way = atHost
	case way == atAgent:
		port = e.port
	}
	host, port = cmp.Or(host, e.host), cmp.Or(port, e.port)
	if e.OneHost() && (way == atMaster || way == atHost) {
		host = loopback
	}
	at := net.JoinHostPort(host, strconv.Itoa(port))
	switch {
	case way == byUser:
		return "nowhere: " + e.noPlace(), false
	case port == 0 && way == atHost:
		return "nowhere: " + noPort(host), false
	case way == byFile:
		text = "at a store of rank 0, published in a file in " + e.dir
	case way == byPMI:
		text = "at a store of rank 0, published in the key-value space of PMI"
	case way == atAgent:
		text = "at the TCPStore of torchrun, " + at
	case way == atMaster:
		text = "at a store of rank 0, published at " + at
	case way == atHost && host == "":
		text = fmt.Sprintf("at a store of rank 0, port %d of this host", port)
	case way == atHost:
		text = "at a store of rank 0, " + at
	default:
		text = "at the store at " + at
	}
	return text, true
}

func noPort(host string) string {
	return fmt.Sprintf("the port of rank 0 on %s is unknown: choose one with HVD_RENDEZVOUS_PORT", host)
}

// noPlace returns a text for users that says why the ranks cannot meet and what to do about it.
func (e *Env) noPlace() string {
	why := string(e.Kind) + " does not say where rank 0 is"
	if e.missing != "" {
		why = e.missing + ", and " + why
	}
	return why + ": set HVD_RENDEZVOUS_HOST and HVD_RENDEZVOUS_PORT, or MASTER_ADDR and MASTER_PORT, to the " +
		"host of rank 0 and a free port there, or start the job with hvdrun -H; " + aloneAdvice
}
