# Written where no container could be built: not tried yet. The same commands run in `make dist` and `make demo`.
# The demo in a container: docker build -t triops . && docker run --rm -v "$PWD/triops-demo:/work/triops-demo" triops
FROM python:3.11-slim
WORKDIR /work
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[cli,viz]'
CMD ["triops", "demo"]
