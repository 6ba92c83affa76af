// Measures the MPI collectives of an allreduce of 4 bytes in lock-step (docs/mpi.md, Speed): an allreduce of bit
// vectors of 24 bytes, the broadcast of a decision of 512 bytes unless the ranks repeat one, and the allreduce itself.
// Rank 0 prints the medians of the times with and without the broadcast, in microseconds.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { WARMUP = 5000, CALLS = 100000 };

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void complete(MPI_Request *r) {
  for (int done = 0; !done;) MPI_Test(r, &done, MPI_STATUS_IGNORE);
}

static double median(MPI_Comm negotiation, MPI_Comm data, int broadcasts) {
  static double times[CALLS];
  static char decision[512];
  uint64_t votes[3] = {1, 2, 3};
  float x = 0;
  MPI_Request r;
  for (int i = -WARMUP; i < CALLS; i++) {
    double start = MPI_Wtime();
    MPI_Iallreduce(MPI_IN_PLACE, votes, 3, MPI_UINT64_T, MPI_BAND, negotiation, &r);
    complete(&r);
    if (broadcasts) {
      MPI_Ibcast(decision, sizeof decision, MPI_BYTE, 0, negotiation, &r);
      complete(&r);
    }
    MPI_Iallreduce(MPI_IN_PLACE, &x, 1, MPI_FLOAT, MPI_SUM, data, &r);
    complete(&r);
    if (i >= 0) times[i] = MPI_Wtime() - start;
  }
  qsort(times, CALLS, sizeof *times, compare);
  return 1e6 * times[CALLS / 2];
}

int main(int argc, char **argv) {
  int level, rank;
  // gohvd sets this parameter of Open MPI too, and initializes MPI at this level.
  setenv("OMPI_MCA_coll_libnbc_iallreduce_algorithm", "3", 0);
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm negotiation, data;
  MPI_Comm_dup(MPI_COMM_WORLD, &negotiation);
  MPI_Comm_dup(MPI_COMM_WORLD, &data);
  double three = median(negotiation, data, 1), two = median(negotiation, data, 0);
  if (rank == 0) printf("%.3f %.3f\n", three, two);
  MPI_Finalize();
}
