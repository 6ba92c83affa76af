package bootstrap_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/bootstrap"
)

func TestFindAllocation(t *testing.T) {
	two := map[string]string{"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4,1"}
	with := func(name, value string) map[string]string {
		m := map[string]string{name: value}
		for k, v := range two {
			if k != name {
				m[k] = v
			}
		}
		return m
	}
	all := &bootstrap.Allocation{Hosts: []string{"n1", "n2"}, Tasks: []int{4, 1}}
	for name, c := range map[string]struct {
		env  map[string]string
		want *bootstrap.Allocation
		err  string
	}{
		"none":              {map[string]string{}, nil, ""},
		"a batch script":    {two, all, ""},
		"with a step":       {with("SLURM_STEP_ID", "4294967291"), all, ""},
		"a shell of salloc": {with("SLURM_STEP_ID", "4294967290"), all, ""},
		"a task":            {with("SLURM_STEP_ID", "0"), nil, ""},
		"heterogeneous":     {map[string]string{"SLURM_HET_SIZE": "2"}, nil, "this is a heterogeneous job of Slurm: name the hosts"},
		"bad hosts":         {with("SLURM_JOB_NODELIST", "n[2-1]"), nil, "SLURM_JOB_NODELIST: "},
		"bad tasks":         {with("SLURM_TASKS_PER_NODE", "x"), nil, "SLURM_TASKS_PER_NODE: "},
		"too few hosts": {with("SLURM_TASKS_PER_NODE", "4"), nil,
			`SLURM_TASKS_PER_NODE is "4", which means 1 hosts, but SLURM_JOB_NODELIST has 2`},
	} {
		got, err := bootstrap.FindAllocation(func(name string) string { return c.env[name] })
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) ||
			!reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %+v and error %v, want %+v and %q", name, got, err, c.want, c.err)
		}
	}
}
