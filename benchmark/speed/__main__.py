from benchmark.speed import matrix
from common.arguments import parse
from common.processes import end_as_at_ctrl_c

end_as_at_ctrl_c()
matrix.main(parse(matrix.Args, matrix.__doc__))
