package elastic_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log"

	"github.com/gohvd/gohvd/elastic"
	"github.com/gohvd/gohvd/hvd"
)

// model is what must survive the death of a rank: the parameters and the number of steps.
type model struct {
	Step    int
	Weights []float32
}

func (m *model) Save() ([]byte, error)     { return json.Marshal(m) }
func (m *model) Restore(data []byte) error { return json.Unmarshal(data, m) }

// Under "hvdrun -np 4 --min-np 2", the job goes on when a rank dies. Without hvdrun, the job has one rank.
func Example() {
	ctx := context.Background()
	m := &model{Weights: make([]float32, 3)}
	err := elastic.Run(ctx, m, func(ctx context.Context, job *elastic.Job) error {
		for m.Step < 10 {
			gradients := []float32{1, 2, 3} // computed from this rank's part of the data
			mean, err := hvd.Allreduce(ctx, gradients)
			if err != nil {
				return err
			}
			for i, g := range mean {
				m.Weights[i] -= 0.5 * g
			}
			m.Step++
			if err := job.Commit(ctx); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(m.Step, m.Weights)
	if err := hvd.Shutdown(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: 10 [-5 -10 -15]
}
