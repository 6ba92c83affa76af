package launch

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/topo"
)

// spec holds what is fixed before the job starts: the options of Run and what follows from them. All
// goroutines of the launcher may read it.
type spec struct {
	o       *Options
	places  []Assignment // place of each rank
	hosts   int          // number of hosts that have ranks
	several bool         // some rank runs on another host
	id      string
	env     []string // environment that all ranks have in common
}

// newSpec returns the spec of a job whose ranks are at the given places. An elastic job has no places.
func newSpec(o *Options, places []Assignment) (s *spec, err error) {
	var id [16]byte
	rand.Read(id[:]) // never fails
	s = &spec{o: o, places: places, id: hex.EncodeToString(id[:])}
	if o.Elastic == nil {
		s.hosts = lastHost(places) + 1
		s.several = s.hosts > 1 || !IsThisHost(o.Hosts[0].Name)
	} else {
		s.several = o.Elastic.Discovery != nil || len(o.Hosts) > 1 || !IsThisHost(o.Hosts[0].Name)
	}
	placing := storeVariables(netip.AddrPort{})
	if o.Elastic != nil {
		placing = slices.Concat(placing, rankVariables(topo.Topology{}), s.jobVariables(),
			[]string{MemberVariable, "HOROVOD_HOSTNAME=", "HOROVOD_ELASTIC="})
	} else {
		placing = append(placing, s.processVariables(0)...)
	}
	if o.Nodes != nil {
		placing = append(placing, schedulerVariable(netip.Addr{}))
	}
	inherited := without(o.Env, slices.Concat(rankVariables(topo.Topology{}),
		[]string{processVariable, MemberVariable, "HOROVOD_HOSTNAME=", "HOROVOD_ELASTIC="}))
	if o.Elastic != nil || o.TorchStore.IsValid() {
		// Those of an outer launcher, such as torchrun, are not true for the ranks of an elastic job either.
		inherited = without(inherited, torchVariables(netip.AddrPort{}, Assignment{}, 0))
	}
	if s.env, err = merge(inherited, o.Set, placing); err != nil {
		return nil, err
	}
	return s, nil
}

// lastHost returns the greatest index of a host that has ranks.
func lastHost(places []Assignment) (last int) {
	for _, p := range places {
		last = max(last, p.Host)
	}
	return last
}

// processVariables returns the environment variables that tell process r its place in the job, its host and
// its job. The processes of an elastic job have memberVariables.
func (s *spec) processVariables(r int) []string {
	job := s.jobVariables()
	if s.o.Starter != "" {
		return job // it starts the ranks on hosts that it chooses
	}
	place := rankVariables(s.places[r].Topology)
	if s.o.Nodes != nil {
		place = s.o.Nodes.variables(r, s.several)
	}
	return append(append(place, "HOROVOD_HOSTNAME="+s.o.Hosts[s.places[r].Host].Name), job...)
}

// memberVariables returns the environment variables that tell a process of an elastic job its host, its local
// rank, its job and which member it is. Its other numbers change.
func (s *spec) memberVariables(host string, m elastic.Member) []string {
	return append(s.jobVariables(), "HOROVOD_HOSTNAME="+host, "HOROVOD_LOCAL_RANK="+strconv.Itoa(m.Index),
		"HOROVOD_ELASTIC=1", MemberVariable+"="+m.Text())
}

// jobVariables returns the environment variables that tell all processes of which job they are.
func (s *spec) jobVariables() []string {
	return []string{"HVD_JOB_ID=" + s.id, "HVD_SECRET=" + s.o.Secret}
}

// rankVariables returns the environment variables that tell a rank its number, the number of ranks, and its
// local and cross rank.
func rankVariables(p topo.Topology) []string {
	return []string{
		"HOROVOD_RANK=" + strconv.Itoa(p.Rank),
		"HOROVOD_SIZE=" + strconv.Itoa(p.Size),
		"HOROVOD_LOCAL_RANK=" + strconv.Itoa(p.LocalRank),
		"HOROVOD_LOCAL_SIZE=" + strconv.Itoa(p.LocalSize),
		"HOROVOD_CROSS_RANK=" + strconv.Itoa(p.CrossRank),
		"HOROVOD_CROSS_SIZE=" + strconv.Itoa(p.CrossSize),
	}
}

// storeVariables returns the environment variables that hold the address of the job's store.
func storeVariables(addr netip.AddrPort) []string {
	return []string{
		"HOROVOD_GLOO_RENDEZVOUS_ADDR=" + addr.Addr().String(),
		"HOROVOD_GLOO_RENDEZVOUS_PORT=" + strconv.Itoa(int(addr.Port())),
	}
}

// nameOf returns the name of a variable v of the form NAME=value.
func nameOf(v string) string {
	name, _, _ := strings.Cut(v, "=")
	return name
}

// has reports whether vars contains a variable with the given name.
func has(vars []string, name string) bool {
	return slices.ContainsFunc(vars, func(v string) bool { return nameOf(v) == name })
}

// without returns a copy of env without the variables whose names occur in vars.
func without(env, vars []string) []string {
	// Use a map, because a pod of a large cluster may have thousands of variables.
	named := make(map[string]bool, len(vars))
	for _, v := range vars {
		named[nameOf(v)] = true
	}
	return slices.DeleteFunc(slices.Clone(env), func(v string) bool { return named[nameOf(v)] })
}

// torchVariables returns the variables that torch.distributed expects from a launcher, for the rank at place
// p, or nil if there is no TCPStore. It leaves out the variables that the user sets with Options.Set, because
// the user may want another store.
func (s *spec) torchVariables(p Assignment) []string {
	if !s.o.TorchStore.IsValid() {
		return nil
	}
	return without(torchVariables(s.o.TorchStore, p, s.hosts), s.o.Set)
}

// torchVariables returns the variables that torch.distributed expects from a launcher.
func torchVariables(addr netip.AddrPort, p Assignment, hosts int) []string {
	return []string{
		"MASTER_ADDR=" + addr.Addr().String(),
		"MASTER_PORT=" + strconv.Itoa(int(addr.Port())),
		"RANK=" + strconv.Itoa(p.Rank),
		"WORLD_SIZE=" + strconv.Itoa(p.Size),
		"LOCAL_RANK=" + strconv.Itoa(p.LocalRank),
		"LOCAL_WORLD_SIZE=" + strconv.Itoa(p.LocalSize),
		"GROUP_RANK=" + strconv.Itoa(p.Host),
		"GROUP_WORLD_SIZE=" + strconv.Itoa(hosts),
		// The launcher serves the store, so rank 0 must not serve one.
		"TORCHELASTIC_USE_AGENT_STORE=True",
		"TORCHELASTIC_RESTART_COUNT=0",
	}
}

// merge returns the environment of all ranks. It contains the variables of inherited and of set. If both have
// a variable with the same name, merge uses the one in set. If a name occurs more than once in set, merge
// uses the last one. placing holds the variables that the launcher sets itself: merge drops them from
// inherited, and returns an error if set contains one.
func merge(inherited, set, placing []string) ([]string, error) {
	env := without(inherited, placing)
	// The launcher puts a prefix before each line of output, so Python should not keep lines in a buffer.
	for _, v := range append([]string{"PYTHONUNBUFFERED=1"}, set...) {
		switch name := nameOf(v); {
		case name == "" || !strings.Contains(v, "=") || strings.Contains(v, "\x00"):
			return nil, &OptionError{fmt.Sprintf("environment: got %q, want NAME=value", v)}
		case has(placing, name):
			return nil, &OptionError{fmt.Sprintf("environment: got %s, which the launcher itself sets", name)}
		}
		env = append(without(env, []string{v}), v)
	}
	return env, nil
}

// lookPath returns the path of a program. If file contains a slash, file is the path. Otherwise lookPath
// returns the first match in the directories that the variable PATH in env lists.
func lookPath(file string, env []string) (string, error) {
	err := error(exec.ErrNotFound)
	candidates := []string{file}
	if !strings.Contains(file, "/") {
		candidates = nil
		for _, dir := range filepath.SplitList(valueOf(env, "PATH")) {
			// A relative directory is skipped, because it depends on the working directory of the rank.
			if filepath.IsAbs(dir) {
				candidates = append(candidates, filepath.Join(dir, file))
			}
		}
	}
	for _, c := range candidates {
		var path string
		if path, err = exec.LookPath(c); err == nil {
			return path, nil
		}
		if lookup, ok := errors.AsType[*exec.Error](err); ok {
			err = lookup.Err // keep only the cause, because callers add the name of the program
		}
	}
	if len(candidates) != 1 || candidates[0] != file {
		err = exec.ErrNotFound
	}
	return "", err
}

// valueOf returns the value of the variable with the given name in env. If the name occurs more than once, it
// returns the last value. If the name does not occur, it returns "".
func valueOf(env []string, name string) (value string) {
	for _, v := range env {
		if text, ok := strings.CutPrefix(v, name+"="); ok {
			value = text
		}
	}
	return value
}
