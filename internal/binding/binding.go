// Package binding divides the processor cores of a host among the ranks on it, by the topology that the
// kernel shows, and binds processes to their part.
//
// A CPU is what the kernel schedules threads on. A core has several CPUs if it runs several hardware threads.
package binding

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Unit says to what ranks are bound.
type Unit string

const (
	// None means that ranks are not bound.
	None Unit = "none"
	// Core means that the ranks of a host get the same number of cores each, and share none.
	Core Unit = "core"
	// NUMA means that a rank gets all cores of a NUMA node, which ranks may share.
	NUMA Unit = "numa"
)

// CPUs holds the numbers of CPUs, in ascending order.
type CPUs []int

// String returns the CPUs in the form of the kernel, as in 0-3,8.
func (c CPUs) String() string {
	var runs []string
	for i := 0; i < len(c); {
		j := i + 1
		for j < len(c) && c[j] == c[j-1]+1 {
			j++
		}
		run := strconv.Itoa(c[i])
		if j > i+1 {
			run += "-" + strconv.Itoa(c[j-1])
		}
		runs = append(runs, run)
		i = j
	}
	return strings.Join(runs, ",")
}

// maxCPUs is more than the kernel supports. It bounds the memory for the text of a file.
const maxCPUs = 1 << 16

// parse returns the CPUs of a list in the form of the kernel.
func parse(text string) (all CPUs, err error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return nil, nil
	}
	for run := range strings.SplitSeq(text, ",") {
		low, high, isRange := strings.Cut(run, "-")
		first, err1 := strconv.Atoi(low)
		last, err2 := first, error(nil)
		if isRange {
			last, err2 = strconv.Atoi(high)
		}
		if errors.Join(err1, err2) != nil || first < 0 || first > last || last >= maxCPUs {
			return nil, fmt.Errorf("got %q, want a list of CPUs, as in 0-3,8", text)
		}
		for cpu := first; cpu <= last; cpu++ {
			all = append(all, cpu)
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// Topology describes the CPUs that a process may use.
type Topology struct {
	allowed CPUs
	// nodes are the NUMA nodes with at least one of these CPUs, in the order of their numbers.
	nodes []node
	// numNodes is the number of NUMA nodes of the host that have CPUs.
	numNodes int
}

// node is a NUMA node, with its cores in the order of their first CPUs. A core has only allowed CPUs.
type node struct {
	number int
	cores  []CPUs
}

const system = "sys/devices/system"

// Read reads the topology from the folder sys/devices/system of root, the root of the file system. Of the
// CPUs, it contains those in allowed.
func Read(root fs.FS, allowed CPUs) (*Topology, error) {
	t := &Topology{allowed: allowed}
	numbers, cpusOf, err := nodes(root)
	if err != nil {
		return nil, err
	}
	if len(numbers) == 0 { // the kernel does not support NUMA
		numbers, cpusOf = []int{0}, map[int]CPUs{0: allowed}
	}
	t.numNodes = len(numbers)
	left := slices.Clone(allowed)
	for _, number := range numbers {
		n := node{number: number}
		for _, cpu := range cpusOf[number] {
			if !slices.Contains(left, cpu) {
				continue // this process may not use it, or another CPU of its core came before
			}
			file := fmt.Sprintf("%s/cpu/cpu%d/topology/thread_siblings_list", system, cpu)
			core, err := list(root, file)
			if err != nil {
				return nil, err
			}
			if !slices.Contains(core, cpu) {
				return nil, fmt.Errorf("/%s: got %s, want a list with CPU %d", file, core, cpu)
			}
			core = slices.DeleteFunc(core, func(c int) bool { return !slices.Contains(left, c) })
			left = slices.DeleteFunc(left, func(c int) bool { return slices.Contains(core, c) })
			n.cores = append(n.cores, core)
		}
		if len(n.cores) > 0 {
			t.nodes = append(t.nodes, n)
		}
	}
	if len(left) > 0 {
		return nil, fmt.Errorf("no file /%s/node/node*/cpulist has CPU %d", system, left[0])
	}
	return t, nil
}

// nodes returns the numbers of the NUMA nodes that have CPUs, in ascending order, and the CPUs of each.
func nodes(root fs.FS) (numbers []int, cpusOf map[int]CPUs, err error) {
	files, err := fs.Glob(root, system+"/node/node[0-9]*/cpulist")
	if err != nil {
		return nil, nil, err
	}
	cpusOf = make(map[int]CPUs)
	for _, file := range files {
		number, err := strconv.Atoi(strings.TrimPrefix(path.Base(path.Dir(file)), "node"))
		if err != nil {
			return nil, nil, fmt.Errorf("/%s: %w", file, err)
		}
		cpus, err := list(root, file)
		if err != nil {
			return nil, nil, err
		}
		if len(cpus) > 0 { // a node may have only memory
			numbers, cpusOf[number] = append(numbers, number), cpus
		}
	}
	slices.Sort(numbers)
	return numbers, cpusOf, nil
}

// list reads a file with a list of CPUs.
func list(root fs.FS, file string) (CPUs, error) {
	text, err := fs.ReadFile(root, file)
	if err != nil {
		return nil, fmt.Errorf("read the topology of the processor: %w", err)
	}
	cpus, err := parse(string(text))
	if err != nil {
		return nil, fmt.Errorf("/%s: %w", file, err)
	}
	return cpus, nil
}

// cores returns the number of cores.
func (t *Topology) cores() (n int) {
	for _, node := range t.nodes {
		n += len(node.cores)
	}
	return n
}

// Describe describes the cores and the NUMA nodes, for users.
func (t *Topology) Describe() string {
	text := fmt.Sprintf("%s on CPUs %s", count(t.cores(), "core"), t.allowed)
	if t.numNodes == 1 {
		return text + ", one NUMA node"
	}
	var parts []string
	for _, n := range t.nodes {
		parts = append(parts, fmt.Sprintf("node %d has %s", n.number, n.cpus()))
	}
	return fmt.Sprintf("%s, in %d of %d NUMA nodes: %s", text, len(t.nodes), t.numNodes, strings.Join(parts, ", "))
}

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// cpus returns all CPUs of the node.
func (n node) cpus() CPUs { return join(n.cores) }

func join(cores []CPUs) CPUs {
	all := CPUs(slices.Concat(cores...))
	slices.Sort(all)
	return all
}

// Place returns the CPUs to which the rank with the given local rank is bound. size is the number of ranks on
// the host. to is Core or NUMA. The ranks are spread evenly over the cores, in the order of the local ranks,
// so that neighbours are close to each other.
//
// With Core, each rank gets as many cores as possible, but all get the same number, and the cores of a rank
// are in one NUMA node.
func (t *Topology) Place(to Unit, rank, size int) (CPUs, error) {
	n := t.cores()
	switch {
	case rank < 0 || rank >= size:
		return nil, fmt.Errorf("got local rank %d of %d", rank, size)
	case to == NUMA && t.numNodes == 1:
		return nil, errors.New("this host has only one NUMA node, so there is nothing to bind ranks to: use core or none")
	case to == NUMA:
		at := rank * n / size // the number of a core
		for _, node := range t.nodes {
			if at < len(node.cores) {
				return node.cpus(), nil
			}
			at -= len(node.cores)
		}
	case to == Core && size > n:
		return nil, fmt.Errorf("got %s on this host, but they may use only %s (CPUs %s): start fewer ranks, allow more "+
			"CPUs, or use none, which is also right if the launcher has bound each rank already", count(size, "rank"),
			count(n, "core"), t.allowed)
	case to == Core:
		for share := n / size; share > 0; share-- {
			var parts [][]CPUs
			for _, node := range t.nodes {
				for i := 0; i+share <= len(node.cores); i += share {
					parts = append(parts, node.cores[i:i+share])
				}
			}
			if len(parts) >= size {
				return join(parts[rank*len(parts)/size]), nil
			}
		}
	}
	return nil, fmt.Errorf("got the unit %q, want core or numa", to)
}
