package bootstrap_test

import (
	"context"
	"fmt"

	"github.com/gohvd/gohvd/internal/bootstrap"
)

func Example() {
	// mpirun sets these variables for a job of one rank.
	environment := map[string]string{
		"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1",
		"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
	}
	env, lines, err := bootstrap.Detect(func(name string) string { return environment[name] })
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, line := range lines[:4] {
		fmt.Println(line)
	}
	m, err := env.Meet(context.Background(), bootstrap.MeetOptions{})
	if err != nil {
		fmt.Println(err)
		return
	}
	n, err := m.Store.Add(context.Background(), "ranks", 1)
	fmt.Println(n, err, m.Close())
	// Output:
	// hvdrun: neither HOROVOD_RANK nor HOROVOD_SIZE is set
	// HVD_SIZE=1: HVD_SIZE is not 1
	// torchrun: neither TORCHELASTIC_RUN_ID nor TORCHELASTIC_USE_AGENT_STORE is set
	// Open MPI: rank 0 of 1, local rank 0 of 1, cross rank 0 of 1, by OMPI_COMM_WORLD_RANK
	// 1 <nil> <nil>
}

func ExampleExpandHosts() {
	fmt.Println(bootstrap.ExpandHosts("node[01-03,7],gpu-[1-2]-x"))
	// Output: [node01 node02 node03 node7 gpu-1-x gpu-2-x] <nil>
}
